"""Frames over a stream socket, whatever its family; shared by unix and tcp.

The socket is a blocking one with kernel timeouts of `stall` seconds (SO_SNDTIMEO, SO_RCVTIMEO). A
small frame then costs one system call at each end, a large one few, and the kernel itself says when
nothing moved for that long: EAGAIN. Only the first byte of a frame is sent without blocking,
because that is the byte a deadline is for.

This file must not know addresses, nor what a frame means.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final, NoReturn, final

from gradwire.errors import BadMessage, GradwireError, PeerLost
from gradwire.options import Limits
from gradwire.transport.base import (
    CLOSED_BY_PEER,
    RESET_BY_PEER,
    closed_here,
    unread_by_deadline,
)
from gradwire.transport.blocks import BlockPool
from gradwire.transport.guard import Guard
from gradwire.transport.shared import (
    ANCILLARY_ROOM,
    NOTE,
    READ_FLAGS,
    Ancillary,
    Received,
    SharedMemory,
)
from gradwire.transport.spinning import Spin
from gradwire.wire.frame import (
    IN_BLOCK,
    IS_ANSWER,
    PREFIX,
    TAKES_BLOCKS,
    Buffer,
    Frame,
    Prefix,
    decode_prefix,
    encode_prefix,
)

_READ_AHEAD: Final = 1 << 16
_MOST_PARTS: Final = 1024
_JOINED_HEAD: Final = 1 << 14
_LONGEST_POLL: Final = 3600.0
_AT_ONCE: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_PATIENTLY: Final = socket.MSG_NOSIGNAL
_INTERRUPTED = closed_here("interrupted in the middle of a message")


@final
class SocketChannel:
    """One end of a connected stream socket, which it owns.

    With `shared`, which is for unix sockets, large payloads go beside it.
    """

    def __init__(
        self,
        sock: socket.socket,
        remote: str,
        *,
        limits: Limits,
        stall: float,
        pool: BlockPool,
        shared: SharedMemory | None = None,
    ) -> None:
        self.remote = remote
        self.limits = limits
        self._stall = stall
        self._pool = pool
        self._sock = sock
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._shared = shared
        self._known_flags = IS_ANSWER | TAKES_BLOCKS | (IN_BLOCK if shared else 0)
        also_close = shared.close if shared else lambda: None
        self._guard = Guard(sock, self._sending, self._receiving, also_close=also_close)
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._start = self._end = 0
        self._spin = Spin()
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, as_timeval(stall))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, as_timeval(stall))

    def __repr__(self) -> str:
        return f"<SocketChannel to {self.remote}: {self._guard.story or 'open'}>"

    def close(self, reason: str = "close() was called") -> None:
        """Shut the connection down; see `Channel.close`."""
        self._guard.end(closed_here(reason))

    def send(self, frame: Frame, deadline: float) -> None:
        """Give the frame to the kernel; see `Channel.send`.

        hot: benchmarks of round trips and of bandwidth
        """
        if self._shared is None:
            self._transmit(_parts_of(frame), (), deadline)
            return
        loan = self._shared.place(frame.payload)
        if loan is None:
            self._transmit(_parts_of(frame, TAKES_BLOCKS), (), deadline)
            return
        with loan:
            prefix = encode_prefix(frame, TAKES_BLOCKS | IN_BLOCK)
            self._transmit([prefix, frame.head, loan.note], loan.ancillary, deadline)

    def recv(self) -> Frame:
        """Block for the next frame; see `Channel.recv`."""
        frame = self.maybe_recv(math.inf)
        assert frame is not None, "without a limit it waits until one comes"
        return frame

    def maybe_recv(self, until: float) -> Frame | None:
        """Wait so long for the next frame; see `Channel.maybe_recv`.

        hot: benchmarks of round trips and of bandwidth
        """
        try:
            with self._receiving:
                if self._guard.story is not None:
                    raise PeerLost(self._guard.story)
                if self._start == self._end and not self._await_frame(until):
                    return None
                return self._read_frame()
        finally:
            if self._guard.story is not None:
                self._guard.settle()

    # --- sending, under the lock ---

    def _transmit(self, parts: list[Buffer], ancillary: Ancillary, deadline: float) -> None:
        if not self._sending.acquire(blocking=False):
            self._wait_for_turn(deadline)
        try:
            self._send(parts, ancillary, deadline)
        finally:
            self._sending.release()
            if self._guard.story is not None:
                self._guard.settle()

    def _wait_for_turn(self, deadline: float) -> None:
        left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not self._sending.acquire(timeout=left):
            raise unread_by_deadline(self.remote)

    def _send(self, parts: list[Buffer], ancillary: Ancillary, deadline: float) -> None:
        waiting = False
        try:
            rest = self._push(parts, _AT_ONCE, ancillary)
            while rest is parts:
                waiting = True
                self._wait_for_room(deadline)
                waiting = False
                rest = self._push(parts, _AT_ONCE, ancillary)
            while rest:
                before = rest
                rest = self._push(before, _PATIENTLY)
                if rest is before:
                    self._give_up_stalled()
        except GradwireError:
            raise
        except BaseException:
            # A Ctrl-C may land between the system call and its result being noted: nobody knows how
            # much has left, so nothing more may follow it.
            if not waiting:
                self._guard.end(_INTERRUPTED)
            raise

    def _push(self, parts: list[Buffer], flags: int, ancillary: Ancillary = ()) -> list[Buffer]:
        """Give the kernel what it takes, and return the rest: `parts` itself if it took nothing."""
        if self._guard.story is not None:
            raise PeerLost(self._guard.story)
        try:
            if len(parts) == 1:
                sent = self._sock.send(parts[0], flags)
            else:
                sent = self._sock.sendmsg(parts[:_MOST_PARTS], ancillary, flags)
        except BlockingIOError:
            return parts
        except OSError as error:
            raise self._lost_sending(error) from error
        return _after(parts, sent)

    def _wait_for_room(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise unread_by_deadline(self.remote)
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        poller.poll(1 + int(1000 * min(left, _LONGEST_POLL)))

    def _lost_sending(self, error: OSError) -> PeerLost:
        # A peer that closed may have sent its last answers before: then only sending is
        # over, and recv finds the end by itself.
        if not isinstance(error, ConnectionError):
            self._guard.end(_story_of(error))
        return PeerLost(self._guard.story or _story_of(error))

    # --- receiving, under the lock ---

    def _await_frame(self, until: float) -> bool:
        """Read ahead the first bytes of a frame; False if the peer has none for us by then."""
        self._start = self._end = 0
        came: list[int | Received] = []
        looks = until > 0 and self._spin.begin()
        while not came:
            flags = socket.MSG_DONTWAIT if looks or until < math.inf else 0
            try:
                # In one step for the interpreter, so that a Ctrl-C while waiting, which finds
                # this list empty, leaves the channel in order.
                came.extend(self._first_bytes(flags))
                self._end = self._counted(came[0])
            except BlockingIOError:
                if looks:
                    looks = self._spin.goes_on()
                elif flags and not self._wait_for_bytes(until):
                    return False
            except OSError as error:
                self._lose(_story_of(error), error)
            except BaseException:
                if came:
                    self._guard.end(_INTERRUPTED)
                raise
        if looks:
            self._spin.found()
        if self._end == 0:
            self._lose(CLOSED_BY_PEER)
        return True

    def _first_bytes(self, flags: int) -> Iterator[int | Received]:
        """One read, when it is asked for."""
        if self._shared is None:
            return map(self._sock.recv_into, (self._ahead,), (0,), (flags,))
        flags |= READ_FLAGS
        return map(self._sock.recvmsg_into, ((self._ahead,),), (ANCILLARY_ROOM,), (flags,))

    def _wait_for_bytes(self, until: float) -> bool:
        left = until - time.monotonic()
        if left <= 0:
            return False
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.poll(1 + int(1000 * min(left, _LONGEST_POLL)))
        return True

    def _read_frame(self) -> Frame:
        try:
            self._fill(PREFIX.size)
            prefix = decode_prefix(self._ahead[self._start :], self.limits, self._known_flags)
            self._start += PREFIX.size
            head = self._read_head(prefix.head_length)
            if self._shared is not None and prefix.flags & TAKES_BLOCKS:
                self._shared.peer_takes_blocks = True
            payload = self._payload_of(prefix)
            return Frame(prefix.kind, prefix.flags & IS_ANSWER, prefix.request, head, payload)
        except PeerLost:
            raise
        except BadMessage as refusal:
            self._guard.end(closed_here(refusal.message))
            raise
        except BaseException:
            self._guard.end(_INTERRUPTED)
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
        self._fill(length)
        start = self._start
        self._start += length
        return self._ahead[start : start + length].tobytes()

    def _payload_of(self, prefix: Prefix) -> tuple[memoryview, ...]:
        if self._shared is not None and prefix.flags & IN_BLOCK:
            self._fill(NOTE.size)
            note = self._ahead[self._start : self._start + NOTE.size]
            self._start += NOTE.size
            return (self._shared.borrower.open(note, prefix.payload_length, self.limits),)
        return (self._read_payload(prefix.payload_length),) if prefix.payload_length else ()

    def _read_payload(self, length: int) -> memoryview:
        try:
            block = self._pool.take(length)
        except MemoryError as error:
            self._lose(closed_here(f"no memory for a payload of {length} bytes"), error)
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
        try:
            if not past_this_frame:
                count = self._sock.recv_into(target, 0, socket.MSG_WAITALL)
            elif self._shared is None:
                count = self._sock.recv_into(target)
            else:
                received = self._sock.recvmsg_into((target,), ANCILLARY_ROOM, READ_FLAGS)
                count = self._counted(received)
        except BlockingIOError:
            self._give_up_stalled()
        except OSError as error:
            self._lose(_story_of(error), error)
        if count == 0:
            self._lose(f"{CLOSED_BY_PEER} in the middle of a message")
        return count

    def _counted(self, came: int | Received) -> int:
        if isinstance(came, int):
            return came
        assert self._shared is not None
        return self._shared.borrower.note(came)

    # --- the end ---

    def _give_up_stalled(self) -> NoReturn:
        self._lose(closed_here(f"no byte moved for {self._stall:g} s in the middle of a message"))

    def _lose(self, story: str, cause: Exception | None = None) -> NoReturn:
        self._guard.end(story)
        # Not `story`: it may be us who closed, and the socket only looks as if the peer had.
        raise PeerLost(self._guard.story or story) from cause


def as_timeval(seconds: float) -> bytes:
    """A duration as the kernel reads it, never zero, which would mean for ever."""
    whole, fraction = divmod(min(max(seconds, 1e-6), 1e9), 1)
    return struct.pack("ll", int(whole), int(fraction * 1e6))


def reason_of(error: OSError) -> str:
    """What an operating system error says, in the words of our messages."""
    return (error.strerror or str(error)).lower()


def _story_of(error: OSError) -> str:
    if isinstance(error, ConnectionResetError):
        return RESET_BY_PEER
    if isinstance(error, BrokenPipeError):
        return CLOSED_BY_PEER
    return reason_of(error)


def _parts_of(frame: Frame, flags: int = 0) -> list[Buffer]:
    prefix = encode_prefix(frame, flags)
    if len(frame.head) > _JOINED_HEAD:
        return [prefix, frame.head, *frame.payload]
    return [prefix + frame.head, *frame.payload]


def _after(parts: list[Buffer], sent: int) -> list[Buffer]:
    """What is left of `parts` when so many bytes of it are gone; nothing is copied."""
    for position, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[position + 1 :]]
        sent -= len(part)
    assert sent == 0, "a payload part is not a view of single bytes"
    return []
