"""The sending half of a channel over a stream socket: frames in, bytes out.

A frame begins with a non-blocking send. If the kernel accepts no byte before the deadline, the
frame is not sent. A frame that has begun must be finished, or no other could follow: `send`
continues until the deadline, and after that a new thread sends the rest.

A thread must hold the send lock. A finalizer or a signal handler may interrupt it anywhere and send
too. So the rest of a frame that has begun is stored in `_unsent` and `_sent`, which are updated
with no interrupt after the system call: see Note [Reading inside a read] in channel.py. A send that
interrupts another one on its thread sends this rest first.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from contextlib import suppress
from threading import get_ident
from typing import Final, TypeAlias, final
from weakref import WeakValueDictionary

from gradwire import threads
from gradwire.errors import GradwireError, PeerLost, UsageError
from gradwire.threads import taking
from gradwire.transport.base import send_timed_out
from gradwire.transport.shared_memory import Ancillary, SharedMemory
from gradwire.transport.sockets import stream
from gradwire.wire.message import IN_BLOCK, SMALL, Buffer, Frame, encode_prefix, maybe_small

_MOST_PARTS: Final = 1024
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_PATIENTLY: Final = int(socket.MSG_NOSIGNAL)
_AT_ONCE_: Final = (_AT_ONCE,)
# How long a thread waits for a send lock before it releases those that it holds.
_CONTENDED_SECONDS: Final = 0.05

_writers: WeakValueDictionary[int, FrameWriter] = WeakValueDictionary()
"""all of this process, in the order in which a thread reacquires several send locks"""

Unsent: TypeAlias = "bytes | list[Buffer]"


@final
class FrameWriter:
    """Sends frames over a socket."""

    def __init__(
        self,
        sock: stream.SocketLike,
        closer: stream.SocketCloser,
        remote: str,
        *,
        stall: float,
        flags: int,
        shared: SharedMemory | None,
    ) -> None:
        self._sock, self._closer, self._sending = sock, closer, closer.sending
        self._remote, self._stall, self._flags = remote, stall, flags
        self._shared, self.shared_bytes = shared, 0
        self._small = SMALL if shared is None else min(SMALL, shared.smallest - 1)
        self._taking = taking(closer.sending)
        self._sender = 0  # the thread that holds the send lock
        self._unsent: Unsent | None = None  # a frame of which `_sent` bytes were sent
        self._sent = 0
        self.sent_bytes = 0  # of all frames; grows in one step with the store of a send's result
        self._is_blocked = False  # whether in a send that an inner send cannot continue
        # A TLS stream, whose progress is unknown after an interrupt.
        self._is_opaque = not isinstance(sock, socket.socket)
        _writers[id(self)] = self

    def send(self, frame: Frame, deadline: float) -> None:
        """Send a frame; see `Channel.send`.

        hot: benchmarks of round trips
        """
        small = maybe_small(frame, self._flags, self._small)
        if small is None:
            self._send_large(frame, deadline)
            return
        me = get_ident()
        for has_lock in self._taking:  # noqa: B007
            break
        if not has_lock:
            self._transmit([small], (), deadline, frame)
            return
        self._sender = me
        try:
            try:
                sends = map(self._sock.send, (small,), _AT_ONCE_)
                stock = (small, sends)
                del stock  # the send reuses these tuples: see Note [Reading inside a read]
                if self._closer.close_reason is None and self._unsent is None:
                    self._is_blocked, frame.has_left = self._is_opaque, True
                    (sent,) = sends
                    self._is_blocked = False
                    self.sent_bytes += sent
                    if sent == len(small):
                        return
                    self._sent, self._unsent = sent, small
            except BlockingIOError:
                self._is_blocked = frame.has_left = False
            except BaseException as error:
                self._failed_midway(error)
                raise
            self._send_rest(small, deadline, frame)
        finally:
            # As in `_release`; but a KeyboardInterrupt may come when a function is entered, before
            # its first line, and then the lock would never be released.
            if self._unsent is None:
                self._is_blocked = False
                self._sender = 0
                self._sending.release()
                if self._closer.close_reason is not None:
                    self._closer.close_if_unused()
            else:
                self._release()

    def _send_rest(self, small: bytes, deadline: float, frame: Frame) -> None:
        if self._unsent is small:
            self._finish_by(deadline, small)
        else:
            self._send([small], (), deadline, frame)

    def _send_large(self, frame: Frame, deadline: float) -> None:
        """hot: benchmarks of bandwidth"""
        block = self._shared.reserve(frame.payload) if self._shared is not None else None
        if block is not None:
            with block:
                block.fill(frame.payload)
                prefix = encode_prefix(frame, self._flags | IN_BLOCK)
                note, ancillary = block.announced()
                self._transmit([prefix, frame.head, note], ancillary, deadline, frame)
                self.shared_bytes += block.length
            return
        prefix, head = encode_prefix(frame, self._flags), frame.head
        # Fewer buffers make a cheaper call.
        parts: list[Buffer] = [prefix, head] if len(head) > SMALL else [prefix + head]
        self._transmit([*parts, *frame.payload], (), deadline, frame)

    def send_raw(self, data: bytes, deadline: float) -> None:
        """See `Channel.send_raw`."""
        self._transmit([data], (), deadline)

    def _transmit(
        self,
        parts: list[Buffer],
        ancillary: Ancillary,
        deadline: float,
        frame: Frame | None = None,
    ) -> None:
        """Send the buffers as one unit; they are those of `frame`, if that is given."""
        if self._sender == get_ident():  # a finalizer or a signal handler interrupted a send
            if self._is_blocked:
                raise self._cannot_send()
            self._send(parts, ancillary, deadline, frame)
            return
        lent = self._acquire(deadline)
        try:
            try:
                self._send(parts, ancillary, deadline, frame)
            finally:
                self._release()
        finally:
            reacquire_send_locks(lent)

    def _acquire(self, deadline: float) -> list[FrameWriter]:
        """Acquire the send lock; returns those that must be reacquired after the send.

        A finalizer that interrupted a send on one channel may send on another, while a second
        thread does so the other way round. So a thread that waits for a send lock holds no other:
        those of interrupted sends are released, and reacquired when this send is over.
        """
        lent: list[FrameWriter] = []
        patience = _CONTENDED_SECONDS
        try:
            while True:
                left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
                me, wait = get_ident(), min(left, patience)
                # One step with the store of `_sender`: see Note [Reading inside a read].
                (has_lock,) = map(self._sending.acquire, (True,), (wait,))
                if has_lock:
                    self._sender = me
                    return lent
                if wait == left:
                    raise send_timed_out(self._remote)
                patience, lent = math.inf, release_send_locks(must=True)
        except BaseException:
            reacquire_send_locks(lent)
            raise

    def _cannot_send(self) -> UsageError:
        return UsageError(
            "a finalizer or a signal handler cannot send: it interrupted its thread in the "
            f"middle of sending to {self._remote}",
            hint="put the work into a queue.SimpleQueue for another thread",
        )

    def _release(self) -> None:
        """Release the send lock, or give it to a new thread that finishes a frame."""
        if self._unsent is not None and self._closer.close_reason is None:
            self._sender = 0
            threads.thread(f"gradwire send {self._remote}", self._finish).start()
            return
        self._unsent = None
        self._is_blocked = False
        self._sender = 0
        self._sending.release()
        if self._closer.close_reason is not None:
            self._closer.close_if_unused()

    def _send(
        self, parts: list[Buffer], ancillary: Ancillary, deadline: float, frame: Frame | None
    ) -> None:
        """Finish a frame begun before, then begin this one and send it until the deadline."""
        # True while no byte of this frame is in doubt: an exception then leaves the channel usable.
        is_waiting = True
        try:
            while self._go_on(deadline):
                is_waiting = False
                if self._push(None, 0, parts, ancillary, _AT_ONCE, frame):
                    self._finish_by(deadline, parts)
                    return
                is_waiting = True
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                stream.wait_until_ready(self._sock, select.POLLOUT, left)
            raise send_timed_out(self._remote)
        except BaseException as error:
            if not is_waiting:
                self._failed_midway(error)
            raise

    def _finish_by(self, deadline: float, mine: Unsent) -> None:
        """Send the rest of a frame; at the deadline, keep a copy of it to be sent later."""
        if self._go_on(deadline):
            return
        # The caller of `send` may change its buffers when it returns. An inner send may send more
        # of them meanwhile, so copy again until `_sent` is unchanged.
        owned: list[Buffer] = []
        sent = -1
        while self._unsent is mine and self._sent != sent:
            sent = self._sent
            owned = [bytes(part) for part in _after(mine, sent)]
        if self._unsent is mine:
            self._unsent = owned
            self._sent = 0

    def _failed_midway(self, error: BaseException) -> None:
        """End the channel after an exception between a system call and the store of its result.

        That may be a KeyboardInterrupt. It is unknown how much was sent, so no frame may follow.
        """
        if isinstance(error, GradwireError):
            return
        if isinstance(error, OSError):
            raise self._lost_sending(error) from error
        self._closer.end(stream.INTERRUPTED)

    def _go_on(self, deadline: float) -> bool:
        """Finish the frame that has begun; False if the deadline passed before.

        The main thread polls: a handler that interrupts a blocking send could not send.
        """
        blocks = self._unsent is not None and get_ident() != threading.main_thread().ident
        while True:
            unsent, sent = self._unsent, self._sent
            if unsent is None:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            wait = min(left, self._stall)
            flags = _PATIENTLY if blocks and left > self._stall else _AT_ONCE
            ready = flags == _AT_ONCE and stream.wait_until_ready(self._sock, select.POLLOUT, wait)
            self._push(unsent, sent, _after(unsent, sent), (), flags)
            is_idle = not ready and self._unsent is unsent and self._sent == sent
            if is_idle and left > self._stall:
                self._closer.fail(stream.stalled(self._stall))

    def _finish(self) -> None:
        self._sender = get_ident()
        try:
            self._go_on(math.inf)
        except PeerLost:
            pass  # the reader of the channel will find out
        finally:
            # If an interrupt has just ended the channel, the lock may be released already.
            with suppress(RuntimeError):
                self._release()

    def _push(
        self,
        begun: Unsent | None,
        sent: int,
        parts: list[Buffer],
        ancillary: Ancillary,
        flags: int,
        frame: Frame | None = None,
    ) -> bool:
        """Send `parts`: what follows the first `sent` bytes of `begun`, or a new `frame`.

        False if the kernel accepts none, or if an inner send has sent some of them meanwhile.
        """
        if self._closer.close_reason is not None:
            raise PeerLost(self._closer.close_reason)
        length = sum(map(len, parts))
        if len(parts) == 1:
            sends = map(self._sock.send, parts, (flags,))
        else:
            sends = map(self._sock.sendmsg, (parts[:_MOST_PARTS],), (ancillary,), (flags,))
        try:
            stock = (parts, parts), (parts, parts, parts)
            del stock  # the send reuses these tuples: see Note [Reading inside a read]
            if self._unsent is not begun or (begun is not None and self._sent != sent):
                return False
            self._is_blocked = self._is_opaque or flags == _PATIENTLY
            if frame is not None:
                frame.has_left = True
            (count,) = sends
            self._is_blocked = False
            self._sent = sent + count
            self.sent_bytes += count
            self._unsent = None if count == length else begun or parts
        except BlockingIOError:
            self._is_blocked = False
            if frame is not None:
                frame.has_left = False
            return False
        except OSError as error:
            raise self._lost_sending(error) from error
        return True

    def _lost_sending(self, error: OSError) -> PeerLost:
        self._is_blocked = False
        self._unsent = None  # no frame can follow it
        # The peer may have sent answers before it closed, so keep the channel open for reading;
        # its reader will find its end.
        if not isinstance(error, ConnectionError):
            self._closer.end(stream.close_reason_of(error))
        return PeerLost(self._closer.close_reason or stream.close_reason_of(error))


def release_send_locks(*, must: bool = False) -> list[FrameWriter]:
    """Release the send locks that this thread holds; returns their writers.

    For a finalizer or a signal handler that interrupted a send and has to wait: other threads can
    send meanwhile, and the interrupted send rereads its state before each step. A send that cannot
    be interrupted keeps its lock, or raises UsageError if it `must` release it.
    """
    me = get_ident()
    writers = [reference() for reference in _writers.valuerefs()]
    held = [writer for writer in writers if writer is not None and writer._sender == me]
    if must and (blocked := [writer for writer in held if writer._is_blocked]):
        raise blocked[0]._cannot_send()
    lent = [writer for writer in held if not writer._is_blocked]
    for writer in lent:
        writer._sender = 0
        writer._sending.release()
    return lent


def reacquire_send_locks(writers: list[FrameWriter]) -> None:
    """The thread goes on with the sends whose locks were released by `release_send_locks`."""
    me = get_ident()
    for writer in writers:
        # On a closed channel wait at most 1 s: after a fork the holder may not exist.
        patience = -1 if writer._closer.close_reason is None else 1
        (_,) = map(writer._sending.acquire, (True,), (patience,))
        writer._sender = me


def _after(unsent: Unsent, sent: int) -> list[Buffer]:
    """The rest of a frame after `sent` bytes, without a copy."""
    parts = unsent if isinstance(unsent, list) else [unsent]
    for position, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[position + 1 :]]
        sent -= len(part)
    assert sent == 0, "a payload part is not a view of single bytes"
    return []
