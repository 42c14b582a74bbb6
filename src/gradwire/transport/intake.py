"""The receiving half of a channel over a stream socket: bytes in, frames out.

Small frames are read ahead, so that one costs one system call; the payload of a large one goes from
the kernel straight to its block. The channel sees to it that one thread at a time is in here.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, final
from zlib import crc32

from gradwire.errors import BadMessage, PeerLost
from gradwire.options import Limits
from gradwire.transport.base import CLOSED_BY_PEER, closed_here, never
from gradwire.transport.blocks import SMALL_BLOCK, BlockPool, Slab
from gradwire.transport.guard import INTERRUPTED, Guard, stalled, story_of
from gradwire.transport.shared import ANCILLARY_ROOM, NOTE, READ_FLAGS, Received, SharedMemory
from gradwire.transport.spinning import Spin
from gradwire.transport.stream import Stream
from gradwire.wire.frame import (
    IN_BLOCK,
    IS_ANSWER,
    PREFIX,
    SUMS_PAYLOAD,
    TAKES_BLOCKS,
    Frame,
    check_content,
    decode_prefix,
)

_READ_AHEAD: Final = 1 << 16
_LONGEST_POLL: Final = 3600.0
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
_PLAIN_FLAGS: Final = IS_ANSWER | SUMS_PAYLOAD | TAKES_BLOCKS
_NOT_SUMMED: Final = 4
"""The last bytes of a prefix, which are its checksum."""


@final
class Intake:
    """See the top of this file."""

    def __init__(
        self,
        sock: Stream,
        guard: Guard,
        *,
        limits: Limits,
        stall: float,
        pool: BlockPool,
        shared: SharedMemory | None,
    ) -> None:
        self.limits = limits
        self.is_midway = False
        """whether it waits for the rest of a frame"""
        self.taken = 0
        """frames; counted before one is gone from here"""
        self._sock, self._guard, self._stall = sock, guard, stall
        self._pool, self._shared = pool, shared
        self._known_flags = _PLAIN_FLAGS | (IN_BLOCK if shared else 0)
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._start = self._end = 0
        self._slab = Slab()
        self._spin = Spin()
        self._first_bytes: Callable[[int], Any]
        """reads ahead, with these flags"""
        self._patiently = 0 if shared is None else READ_FLAGS
        self._at_once = self._patiently | _AT_ONCE
        if shared is None:
            self._first_bytes = partial(sock.recv_into, self._ahead, 0)
        else:
            self._first_bytes = partial(sock.recvmsg_into, (self._ahead,), ANCILLARY_ROOM)

    def next(self, until: float, done: Callable[[], bool]) -> Frame | None:
        """The next frame; None if none has begun to come by then, or soon after `done`."""
        if self._start == self._end and not self._await_frame(until, done):
            return None
        frame = self._maybe_whole()
        return self._read_frame() if frame is None else frame

    def exactly(self, length: int, until: float) -> bytes | None:
        """So many bytes and none that follow them; None if they are not all there by then.

        Not recvmsg: descriptors that come with them are closed by the kernel.
        """
        heard = bytearray()
        while len(heard) < length:
            try:
                came = self._sock.recv(length - len(heard), _AT_ONCE)
            except BlockingIOError:
                if not self._wait_for_bytes(until, never):
                    return None
                continue
            except OSError as error:
                self._guard.lose(story_of(error), error)
            if not came:
                self._guard.lose(CLOSED_BY_PEER)
            heard += came
        return bytes(heard)

    def _await_frame(self, until: float, done: Callable[[], bool]) -> bool:
        """Read ahead the first bytes of a frame; False if the peer has none for us by then."""
        self._start = self._end = 0
        came: list[Any] = []
        looks = until > 0 and self._spin.begin()
        read, at_once, patiently = self._first_bytes, (self._at_once,), (self._patiently,)
        while not came:
            try:
                # In one step for the interpreter, so that a Ctrl-C while waiting, which finds
                # this list empty, leaves the channel in order.
                came.extend(map(read, at_once if looks or until < math.inf else patiently))
                first = came[0]
                if self._shared is None:
                    self._end = first
                else:
                    self._end = self._counted(first) if first[1] else first[0]
            except BlockingIOError:
                looks = looks and not done() and self._spin.goes_on()
                if not looks and not self._wait_for_bytes(until, done):
                    return False
            except OSError as error:
                self._guard.lose(story_of(error), error)
            except BaseException:
                if came:
                    self._guard.end(INTERRUPTED)
                raise
        if looks:
            self._spin.found()
        if self._end == 0:
            self._guard.lose(CLOSED_BY_PEER)
        return True

    def _wait_for_bytes(self, until: float, done: Callable[[], bool]) -> bool:
        left = until - time.monotonic()
        if left <= 0 or done():
            return False
        longest = _LONGEST_POLL if done is never else 0.0
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.poll(1 + int(1000 * min(left, longest)))
        return True

    def _maybe_whole(self) -> Frame | None:
        """The next frame, if all of it was read ahead and it is in order, else None.

        `_read_frame` takes the others, and says what is wrong with them. Nothing is taken before
        the frame is made, so that an interrupt leaves it where it lies.

        hot: every small message
        """
        ahead, start = self._ahead, self._start
        content = start + PREFIX.size
        if content > self._end:
            return None
        numbers = PREFIX.unpack_from(ahead, start)
        kind, flags, head_length, payload_length, request, content_sum, prefix_sum = numbers
        body = content + head_length
        after = body + payload_length
        if (
            after > self._end
            or payload_length > SMALL_BLOCK
            or flags & ~_PLAIN_FLAGS
            or head_length > self.limits.head
            or payload_length > self.limits.payload
            or crc32(ahead[start : content - _NOT_SUMMED]) != prefix_sum
        ):
            return None
        head = ahead[content:body].tobytes()
        if crc32(ahead[content:after] if flags & SUMS_PAYLOAD else head) != content_sum:
            return None
        payload: tuple[memoryview, ...] = ()
        if payload_length:
            block = self._slab.take(payload_length)
            block[:] = ahead[body:after]
            payload = (block,)
        if flags & TAKES_BLOCKS and self._shared is not None:
            self._shared.peer_takes_blocks = True
        frame = Frame(kind, flags & IS_ANSWER, request, head, payload)
        self.taken += 1
        self._start = after
        return frame

    def _read_frame(self) -> Frame:
        try:
            self._fill(PREFIX.size)
            prefix = decode_prefix(self._ahead, self.limits, self._known_flags, self._start)
            self._start += PREFIX.size
            flags, payload_length = prefix.flags, prefix.payload_length
            head = self._read_head(prefix.head_length)
            if self._shared is not None and flags & TAKES_BLOCKS:
                self._shared.peer_takes_blocks = True
            has_payload = payload_length or flags & IN_BLOCK
            payload = self._payload_of(flags, payload_length) if has_payload else ()
            check_content(prefix, head, payload)
            frame = Frame(prefix.kind, flags & IS_ANSWER, prefix.request, head, payload)
            self.taken += 1
            return frame
        except PeerLost:
            raise
        except BadMessage as refusal:
            self._guard.end(closed_here(refusal.message))
            raise
        except BaseException:
            self._guard.end(INTERRUPTED)
            raise

    def _fill(self, wanted: int) -> None:
        """Read ahead until `wanted` bytes are there; they must fit."""
        if self._end - self._start >= wanted:
            return
        if self._start + wanted > _READ_AHEAD:
            unread = self._end - self._start
            self._ahead[:unread] = self._ahead[self._start : self._end]
            self._start, self._end = 0, unread
        while self._end - self._start < wanted:
            self._end += self._read_into(self._ahead[self._end :], past_this_frame=True)

    def _read_head(self, length: int) -> bytes:
        if length > _READ_AHEAD:
            head = bytearray(length)
            self._read_fully(memoryview(head))
            return bytes(head)
        if self._end - self._start < length:
            self._fill(length)
        start = self._start
        self._start = end = start + length
        return self._ahead[start:end].tobytes()

    def _payload_of(self, flags: int, length: int) -> tuple[memoryview, ...]:
        if self._shared is not None and flags & IN_BLOCK:
            self._fill(NOTE.size)
            note = self._ahead[self._start : self._start + NOTE.size]
            self._start += NOTE.size
            return (self._shared.borrower.open(note, length, self.limits),)
        return (self._read_payload(length),)

    def _read_payload(self, length: int) -> memoryview:
        try:
            block = self._pool.take(length)
        except MemoryError as error:
            self._guard.lose(closed_here(f"no memory for a payload of {length} bytes"), error)
        self._read_fully(block)
        return block

    def _read_fully(self, target: memoryview) -> None:
        """What was read ahead is copied; the rest goes from the kernel to where it belongs."""
        ready = min(len(target), self._end - self._start)
        target[:ready] = self._ahead[self._start : self._start + ready]
        self._start += ready
        while ready < len(target):
            ready += self._read_into(target[ready:])

    def _read_into(self, target: memoryview, *, past_this_frame: bool = False) -> int:
        """Read some; descriptors only come with the first byte of a frame."""
        self.is_midway = True
        try:
            if not past_this_frame:
                count = self._sock.recv_into(target, 0, socket.MSG_WAITALL)
            elif self._shared is None:
                count = self._sock.recv_into(target)
            else:
                received = self._sock.recvmsg_into((target,), ANCILLARY_ROOM, READ_FLAGS)
                count = self._counted(received)
        except BlockingIOError:
            self._guard.lose(stalled(self._stall))
        except OSError as error:
            self._guard.lose(f"{story_of(error)} in the middle of a message", error)
        finally:
            self.is_midway = False
        if count == 0:
            self._guard.lose(f"{CLOSED_BY_PEER} in the middle of a message")
        return count

    def _counted(self, came: Received) -> int:
        """Keep the descriptors that came with the bytes."""
        if not came[1]:
            return came[0]
        assert self._shared is not None
        return self._shared.borrower.note(came)
