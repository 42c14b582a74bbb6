"""A channel over a stream socket of any family; shared by unix, tcp and tls.

The socket is blocking, with kernel timeouts of `stall` seconds (SO_SNDTIMEO, SO_RCVTIMEO): the
kernel reports with EAGAIN that no byte moved for that long. Small frames are read ahead into a
buffer, so that each costs at most one system call; the payload of a large one goes from the kernel
straight to its block. See writer.py for sending.

Note [Reading inside a read]
A signal handler or a finalizer may interrupt a read of its own thread, and make a call whose answer
comes over the same channel. This inner read must continue where the outer one was interrupted. So
the state is consistent wherever other code can run: every change of position is a sequence of
instructions in which CPython runs no other code, that is, without a call instruction, a backward
jump or a new container. `(self._end,) = map(read, …)` is one: the unpacking makes the C call, and
no handler can run before its result is stored. Before each such sequence a reader checks that
`_epoch` has not changed since it began, and starts again if it has. A frame belongs to the reader
that moves `_start` past it. A read cannot be resumed if it blocks in the kernel, or if it is not a
single call into C (TLS): then `_is_blocked` is set, and an inner read raises Reentered. So the main
thread, where signal handlers run, polls and never blocks.

Python 3.11 also collects garbage inside C functions that allocate containers. A read allocates a
tuple of its arguments and, with descriptors, some for its result; no finalizer may run then, as the
count is not stored yet. So the lines with `stock` allocate and drop as many containers as the read
needs: the interpreter then takes them from its free lists, and does not collect. This must not be a
function, as other code may run after a call, and it must come before the check of `_epoch`. Later
Pythons collect only between two instructions. A read that raises is safe: it has read nothing.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast, final
from zlib import crc32

from gradwire.errors import BadMessage, PeerLost
from gradwire.options import Limits, Timeouts
from gradwire.transport import base
from gradwire.transport.buffer_pool import SMALL_BLOCK, BlockPool, Slab
from gradwire.transport.shared_memory import ANCILLARY_ROOM, NOTE, SharedMemory
from gradwire.transport.sockets import stream
from gradwire.transport.sockets.writer import FrameWriter
from gradwire.wire.message import (
    IN_BLOCK,
    IS_ANSWER,
    PREFIX,
    SUMS_PAYLOAD,
    TAKES_BLOCKS,
    Frame,
    Prefix,
    check_content,
    decode_prefix,
)

LIMITS: Final = Limits()
STALL: Final = Timeouts().stall
_READ_AHEAD: Final = 1 << 16
# Flags of a read, as arguments of `map`. Only recvmsg, which receives descriptors, uses the first.
_PATIENTLY: Final = (int(getattr(socket, "MSG_CMSG_CLOEXEC", 0)),)
_AT_ONCE: Final = (_PATIENTLY[0] | socket.MSG_DONTWAIT,)
_PLAIN_FLAGS: Final = IS_ANSWER | SUMS_PAYLOAD | TAKES_BLOCKS
_ALL: Final = slice(None)
_POLL_SECONDS: Final = 0.05
_NOT_SUMMED: Final = 4  # the checksum at the end of a prefix


@final
class SocketChannel:
    """One end of a connected stream socket, which it owns.

    With `shared`, for unix sockets only, large payloads go through shared memory. With `checksum`,
    the checksum of a sent frame covers its payload too.
    """

    def __init__(
        self,
        sock: stream.SocketLike,
        remote: str,
        *,
        limits: Limits,
        stall: float,
        pool: BlockPool,
        shared: SharedMemory | None = None,
        checksum: bool = False,
        peer_names: tuple[str, ...] | None = None,
        binding: bytes = b"",
    ) -> None:
        self.remote, self.peer_names, self.binding = remote, peer_names, binding
        self.limits, self.needs_heartbeat = limits, True
        self._received = self._borrowed = 0  # bytes of frames, and of those in shared memory
        self.frames_received = 0  # grows before `_start` moves past the frame
        self._sock, self._stall, self._pool, self._shared = sock, stall, pool, shared
        self._closer = stream.SocketCloser(sock, shared.close if shared else lambda: None)
        self._receiving = self._closer.receiving
        flags = (TAKES_BLOCKS if shared else 0) | (SUMS_PAYLOAD if checksum else 0)
        writer = self._writer = FrameWriter(
            sock, self._closer, remote, stall=stall, flags=flags, shared=shared
        )
        self.send, self.send_raw = writer.send, writer.send_raw
        self._known_flags = _PLAIN_FLAGS | (IN_BLOCK if shared else 0)
        self._ahead = self._usual = memoryview(bytearray(_READ_AHEAD))
        self._start = self._end = 0
        self._epoch = 0  # grows when `_start` moves, or the buffer is filled from its beginning
        self._rest: _Rest | None = None  # of a frame that a reader has taken
        self._is_blocked = False
        self._is_plain = isinstance(sock, socket.socket)
        self._slab, self._spin = Slab(), stream.Spin()
        self._read_first = self._reading(self._usual)
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, as_timeval(stall))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, as_timeval(stall))

    def __repr__(self) -> str:
        return f"<SocketChannel to {self.remote}: {self._closer.close_reason or 'open'}>"

    def close(self, reason: str = "close() was called") -> None:
        """See `Channel.close`."""
        self._closer.end(base.closed_here(reason))

    @property
    def shared_bytes(self) -> int:
        """See `Channel.shared_bytes`."""
        return 0 if self._shared is None else self._shared.lent_bytes

    def carried(self) -> base.Carried:
        """See `Channel.carried`. A frame counts as received from the moment that it is taken."""
        writer, way = self._writer, self.remote.partition(":")[0]
        carried = {way: (writer.sent_bytes, self._received)}
        if self._shared is not None:
            carried["shm"] = writer.shared_bytes, self._borrowed
        return carried

    def _reading(self, view: memoryview) -> Callable[[int], Any]:
        """A read into the view with the flags that it is given."""
        if self._shared is None:
            return partial(self._sock.recv_into, view, 0)
        return partial(cast(socket.socket, self._sock).recvmsg_into, (view,), ANCILLARY_ROOM)

    def maybe_recv(self, until: float, done: Callable[[], bool] = base.never) -> Frame | None:
        """See `Channel.maybe_recv`. Reentered if it interrupts a read that cannot be resumed.

        hot: benchmarks of round trips and of bandwidth
        """
        closer = self._closer
        try:
            with self._receiving:
                if closer.close_reason is not None:
                    raise PeerLost(closer.close_reason)
                if self._is_blocked:
                    raise base.Reentered
                while True:
                    if self._rest is not None:
                        self._read_fully(self._rest)
                    if self._start == self._end and not self._await_frame(until, done):
                        return None
                    if self._shared is not None and self._shared.received is not None:
                        self._shared.keep_descriptors(self._shared.received)
                    frame = self._maybe_whole()
                    if frame is None:
                        frame = self._maybe_read_frame()
                    if frame is not None:
                        return frame
        finally:
            if closer.close_reason is not None:
                closer.close_if_unused()

    def recv_raw(self, length: int, deadline: float) -> bytes:
        """See `Channel.recv_raw`. Not with recvmsg: the kernel closes descriptors sent along."""
        closer, data = self._closer, bytearray(length)
        missing = memoryview(data)
        try:
            with self._receiving:
                while missing:
                    if closer.close_reason is not None:
                        raise PeerLost(closer.close_reason)
                    try:
                        count = self._sock.recv_into(missing, 0, *_AT_ONCE)
                    except BlockingIOError:
                        if not self._wait_for_bytes(deadline, base.never):
                            raise base.recv_raw_timed_out(self.remote) from None
                        continue
                    except OSError as error:
                        closer.fail(stream.close_reason_of(error), error)
                    if not count:
                        closer.fail(base.CLOSED_BY_PEER)
                    missing = missing[count:]
                    self._received += count
        finally:
            if closer.close_reason is not None:
                closer.close_if_unused()
        return bytes(data)

    def _await_frame(self, until: float, done: Callable[[], bool]) -> bool:
        """Read ahead the first bytes of a frame; False if there are none by `until`."""
        spins = until > 0 and self._spin.begin()
        while True:
            blocks = not spins and until == math.inf
            reads = map(self._read_first, _PATIENTLY if blocks else _AT_ONCE)
            try:
                stock = ((self, self, self), (self, self, self, self), [self])
                del stock  # see the Note; from here to `break` is one step
                if self._start != self._end:
                    break  # an inner read has left some bytes
                self._is_blocked = blocks or not self._is_plain
                self._start = self._end = 0
                if self._shared is None:
                    (self._end,) = reads
                else:
                    (first,) = reads
                    self._end = first[0]
                    if first[1]:
                        self._shared.received = first
                self._epoch += 1
                if self._end == 0:
                    self._closer.fail(base.CLOSED_BY_PEER)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                self._closer.fail(stream.close_reason_of(error), error)
            finally:
                self._is_blocked = False
            spins = spins and not done() and self._spin.should_continue()
            if not spins and not self._wait_for_bytes(until, done):
                return self._start != self._end
        if spins:
            self._spin.found()
        return True

    def _wait_for_bytes(self, until: float, done: Callable[[], bool]) -> bool:
        left = until - time.monotonic()
        if left <= 0 or done():
            return False
        # 0.0 is rounded up to a millisecond; then the caller polls `done` again.
        stream.wait_until_ready(self._sock, select.POLLIN, left if done is base.never else 0.0)
        return True

    def _maybe_whole(self) -> Frame | None:
        """The next frame if the buffer has all of it and it is valid, else None.

        `_maybe_read_frame` handles the others, and raises what is wrong with them. The frame is
        built before `_start` moves, so that an interrupt leaves it in the buffer.

        hot: every small message
        """
        epoch = self._epoch
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
        if self._epoch != epoch:  # an inner read has taken it
            return None
        self.frames_received += 1
        self._received += after - start
        self._epoch = epoch + 1
        self._start = after
        return frame

    def _maybe_read_frame(self) -> Frame | None:
        """The next frame, whose first bytes are in the buffer; None if an inner read took it."""
        try:
            return self._taken_apart()
        except BadMessage as refusal:
            self._closer.end(base.closed_here(refusal.message))
            raise
        except BaseException:
            if self._rest is not None:
                self._closer.end(stream.INTERRUPTED)
            raise

    def _taken_apart(self) -> Frame | None:
        epoch = self._epoch
        if not self._fill(PREFIX.size, epoch):
            return None
        try:
            prefix = decode_prefix(self._ahead, self.limits, self._known_flags, self._start)
        except BadMessage:
            if self._epoch != epoch:  # an inner read took it and overwrote the buffer
                return None
            raise
        head_end = PREFIX.size + prefix.head_length
        ahead, length = head_end, prefix.payload_length
        if prefix.flags & IN_BLOCK:
            ahead, length = head_end + NOTE.size, 0
        if not self._fill(ahead, epoch):
            return None
        start = self._start
        head = bytes(self._ahead[start + PREFIX.size : start + head_end])
        note = bytes(self._ahead[start + head_end : start + ahead])
        try:
            rest = _Rest(self._pool.take(length) if length else memoryview(b""))
        except MemoryError as error:
            self._closer.fail(base.closed_here(f"no memory for a payload of {length} bytes"), error)
        is_new = note and NOTE.unpack(note)[1]
        shared, descriptor = self._shared, None
        if self._epoch != epoch:
            return None
        # Take the frame in one step: from here on an inner read first reads the rest of its
        # payload, and then returns the next frame.
        self.frames_received += 1
        self._received += ahead + length
        self._epoch, self._rest = epoch + 1, rest
        if self._ahead is self._usual:
            self._start += ahead
        else:  # a buffer made for this head: see `_fill`
            self._ahead = self._usual
            self._start = self._end = 0
        if is_new and shared is not None and shared.unclaimed:
            descriptor = shared.unclaimed[0]
            del shared.unclaimed[0]
        self._read_fully(rest)
        return self._made(prefix, head, note, rest.block, descriptor)

    def _made(
        self, prefix: Prefix, head: bytes, note: bytes, block: memoryview, descriptor: int | None
    ) -> Frame:
        payload: tuple[memoryview, ...] = (block,) if len(block) else ()
        if self._shared is not None:
            if prefix.flags & TAKES_BLOCKS:
                self._shared.peer_takes_blocks = True
            if note:
                length = prefix.payload_length
                payload = (self._shared.open(note, length, self.limits, descriptor),)
                self._borrowed += length
        check_content(prefix, head, payload)
        return Frame(prefix.kind, prefix.flags & IS_ANSWER, prefix.request, head, payload)

    def _fill(self, wanted: int, epoch: int) -> bool:
        """Read ahead until the buffer has `wanted` bytes; False if `_epoch` changed.

        If they do not fit, the unread bytes move to its beginning, or to a buffer of this size.
        """
        if self._end - self._start < wanted and self._start + wanted > len(self._ahead):
            unread = self._end - self._start
            ahead = self._usual if wanted <= _READ_AHEAD else memoryview(bytearray(wanted))
            moved, target = self._ahead[self._start : self._end], ahead[:unread]
            if self._epoch != epoch:
                return False
            target[_ALL] = moved
            self._ahead = ahead
            self._start = 0
            self._end = unread
        while self._epoch == epoch and self._end - self._start < wanted:
            end = self._end
            reads = map(self._reading(self._ahead[end:]), _AT_ONCE)
            self._read_some(reads, end, epoch, None, blocks=False)
            if self._shared is not None and self._shared.received is not None:
                self._shared.keep_descriptors(self._shared.received)
        return self._epoch == epoch

    def _read_some(
        self, reads: Iterator[Any], at: int, epoch: int, rest: _Rest | None, *, blocks: bool
    ) -> None:
        """Receive bytes at position `at` of the buffer, or of `rest`; or wait for some."""
        self.needs_heartbeat = False
        count = -1
        try:
            stock = ((self, self, self), (self, self, self, self), [self])
            del stock  # see the Note
            if self._epoch != epoch or at != (self._end if rest is None else rest.ready):
                return
            self._is_blocked = blocks or not self._is_plain
            (came,) = reads
            self._is_blocked = False
            if rest is not None:
                count = came
                rest.ready = at + count
            else:
                count = came if self._shared is None else came[0]
                if self._shared is not None and came[1]:
                    self._shared.received = came
                self._end = at + count
        except OSError as error:
            self._is_blocked = False
            if blocks and isinstance(error, BlockingIOError):  # it has waited for `stall` seconds
                self._closer.fail(stream.stalled(self._stall))
            self._wait_for_more(error, at, epoch, rest)
        finally:
            self.needs_heartbeat = True
        if count == 0:
            self._closer.fail(f"{base.CLOSED_BY_PEER} in the middle of a message")

    def _wait_for_more(self, error: OSError, at: int, epoch: int, rest: _Rest | None) -> None:
        """After a read that found no byte of a frame, wait for some; fail after other errors.

        In short steps: if an inner read has taken all bytes, poll is not woken.
        """
        if not isinstance(error, BlockingIOError):
            self._closer.fail(f"{stream.close_reason_of(error)} in the middle of a message", error)
        until = time.monotonic() + self._stall
        while self._epoch == epoch and at == (self._end if rest is None else rest.ready):
            left = until - time.monotonic()
            if left <= 0:
                self._closer.fail(stream.stalled(self._stall))
            if stream.wait_until_ready(self._sock, select.POLLIN, min(left, _POLL_SECONDS)):
                return

    def _read_fully(self, rest: _Rest) -> None:
        """Complete the rest of a frame, from the buffer and then from the kernel."""
        while True:
            ready = rest.ready
            view = rest.block[ready:]
            if not view:
                break
            epoch, start = self._epoch, self._start
            count = min(self._end - start, len(view))
            if not count:
                # The main thread does not block: see the Note.
                blocks = threading.get_ident() != threading.main_thread().ident
                flags = (socket.MSG_WAITALL,) if blocks else _AT_ONCE
                reads = map(self._sock.recv_into, (view,), (0,), flags)
                self._read_some(reads, ready, epoch, rest, blocks=blocks)
                continue
            source, target = self._ahead[start : start + count], view[:count]
            if rest.ready != ready or self._epoch != epoch:
                continue
            target[_ALL] = source
            rest.ready = ready + count
            self._epoch = epoch + 1
            self._start = start + count
        if self._rest is rest:
            self._rest = None


@dataclass(slots=True, eq=False)
class _Rest:
    """The payload of a frame that was taken, and how many bytes of it are there."""

    block: memoryview
    ready: int = 0


def as_timeval(seconds: float) -> bytes:
    """A duration as a C `struct timeval`; never zero, which means no timeout."""
    whole, fraction = divmod(min(max(seconds, 1e-6), 1e9), 1)
    return struct.pack("ll", int(whole), int(fraction * 1e6))
