"""Frames over a stream socket, whatever its family; shared by unix and tcp.

The socket is a blocking one with kernel timeouts of `stall` seconds (SO_SNDTIMEO, SO_RCVTIMEO). A
small frame then costs one system call at each end, a large one few, and the kernel itself says when
nothing moved for that long: EAGAIN. Only the first byte of a frame is sent without blocking,
because that is the byte a deadline is for.

This file must not know addresses, nor what a frame means.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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
from gradwire.transport.spinning import Spin
from gradwire.wire.frame import PREFIX, Buffer, Frame, decode_prefix, encode_prefix

_READ_AHEAD: Final = 1 << 16
_MOST_PARTS: Final = 1024
_JOINED_HEAD: Final = 1 << 14
_LONGEST_POLL: Final = 3600.0
_AT_ONCE: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_PATIENTLY: Final = socket.MSG_NOSIGNAL
_INTERRUPTED = closed_here("interrupted in the middle of a message")
_OUT_OF_HANDLES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@final
class _Guard:
    """Ends a socket at once, and closes its file descriptor when the last use of it is over.

    Closing a descriptor that another thread is blocked on does not wake it, and the number may be
    given to a new file while it is still in use. So `end` only shuts the connection down, which
    wakes everyone, and whoever leaves last closes: each use holds one of the locks, and calls
    `settle` after its release if `story` is set by then.
    """

    __slots__ = ("_ending", "_sock", "_uses", "story")

    def __init__(self, sock: socket.socket, *uses: threading.Lock) -> None:
        self.story: str | None = None
        self._sock = sock
        self._uses = uses
        # Reentrant, as a signal handler may close what its own thread is closing.
        self._ending = threading.RLock()

    def end(self, story: str) -> bool:
        """Whether this was the first time; only then the story counts."""
        with self._ending:
            first = self.story is None
            if first:
                self.story = story
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self.settle()
        return first

    def settle(self) -> None:
        """Close the descriptor unless it is in use."""
        with self._ending:
            held = [use for use in self._uses if use.acquire(blocking=False)]
            if len(held) == len(self._uses):
                self._sock.close()
            for use in held:
                use.release()


@final
class SocketChannel:
    """One end of a connected stream socket, which it owns."""

    def __init__(
        self, sock: socket.socket, remote: str, *, limits: Limits, stall: float, pool: BlockPool
    ) -> None:
        self.remote = remote
        self.limits = limits
        self._stall = stall
        self._pool = pool
        self._sock = sock
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._guard = _Guard(sock, self._sending, self._receiving)
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
        parts = _parts_of(frame)
        if not self._sending.acquire(blocking=False):
            self._wait_for_turn(deadline)
        try:
            self._send(parts, deadline)
        finally:
            self._sending.release()
            if self._guard.story is not None:
                self._guard.settle()

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

    def _wait_for_turn(self, deadline: float) -> None:
        left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not self._sending.acquire(timeout=left):
            raise unread_by_deadline(self.remote)

    def _send(self, parts: list[Buffer], deadline: float) -> None:
        waiting = False
        try:
            rest = self._push(parts, _AT_ONCE)
            while rest is parts:
                waiting = True
                self._wait_for_room(deadline)
                waiting = False
                rest = self._push(parts, _AT_ONCE)
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

    def _push(self, parts: list[Buffer], flags: int) -> list[Buffer]:
        """Give the kernel what it takes, and return the rest: `parts` itself if it took nothing."""
        if self._guard.story is not None:
            raise PeerLost(self._guard.story)
        try:
            if len(parts) == 1:
                sent = self._sock.send(parts[0], flags)
            else:
                sent = self._sock.sendmsg(parts[:_MOST_PARTS], (), flags)
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
        came: list[int] = []
        looks = until > 0 and self._spin.begin()
        while not came:
            flags = socket.MSG_DONTWAIT if looks or until < math.inf else 0
            try:
                # In one step for the interpreter, so that a Ctrl-C while waiting, which finds
                # this list empty, leaves the channel in order.
                came.extend(map(self._sock.recv_into, (self._ahead,), (0,), (flags,)))
                self._end = came[0]
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
            prefix = decode_prefix(self._ahead[self._start :], self.limits)
            self._start += PREFIX.size
            head = self._read_head(prefix.head_length)
            length = prefix.payload_length
            payload = (self._read_payload(length),) if length else ()
            return Frame(prefix.kind, prefix.flags, prefix.request, head, payload)
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
            self._end += self._read_into(self._ahead[self._end :])

    def _read_head(self, length: int) -> bytes:
        if length > _READ_AHEAD:
            head = bytearray(length)
            self._read_fully(memoryview(head))
            return bytes(head)
        self._fill(length)
        start = self._start
        self._start += length
        return self._ahead[start : start + length].tobytes()

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
            ready += self._read_into(target[ready:], socket.MSG_WAITALL)

    def _read_into(self, target: memoryview, flags: int = 0) -> int:
        try:
            count = self._sock.recv_into(target, 0, flags)
        except BlockingIOError:
            self._give_up_stalled()
        except OSError as error:
            self._lose(_story_of(error), error)
        if count == 0:
            self._lose(f"{CLOSED_BY_PEER} in the middle of a message")
        return count

    # --- the end ---

    def _give_up_stalled(self) -> NoReturn:
        self._lose(closed_here(f"no byte moved for {self._stall:g} s in the middle of a message"))

    def _lose(self, story: str, cause: Exception | None = None) -> NoReturn:
        self._guard.end(story)
        # Not `story`: it may be us who closed, and the socket only looks as if the peer had.
        raise PeerLost(self._guard.story or story) from cause


@final
class SocketListener:
    """A listening socket, which it owns.

    `wrap` makes a channel of an accepted socket, or None to refuse it; `on_close` runs once.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        wrap: Callable[[socket.socket], SocketChannel | None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._sock = sock
        self._wrap = wrap
        self._on_close = on_close
        self._accepting = threading.Lock()
        self._guard = _Guard(sock, self._accepting)
        self._closed = threading.Event()
        sock.setblocking(True)

    def __repr__(self) -> str:
        return f"<SocketListener on {self.address}: {self._guard.story or 'open'}>"

    def accept(self) -> SocketChannel:
        """Block for the next connection; see `Listener.accept`."""
        with self._accepting:
            channel = None
            while channel is None and self._guard.story is None:
                channel = self._maybe_accept()
        if self._guard.story is not None:
            self._guard.settle()
        if channel is None:
            raise PeerLost(f"{self.address} was {self._guard.story}")
        return channel

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening; see `Listener.close`."""
        if self._guard.end(closed_here(reason)):
            self._closed.set()
            self._on_close()

    def _maybe_accept(self) -> SocketChannel | None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            # A peer that left again while it waited is no error of ours. Without free handles the
            # connection stays in the queue: others may be closed meanwhile.
            if error.errno in _OUT_OF_HANDLES:
                self._closed.wait(0.1)
            return None
        try:
            return self._wrap(sock)
        except OSError:
            sock.close()
            return None


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


def _parts_of(frame: Frame) -> list[Buffer]:
    prefix = encode_prefix(frame)
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
