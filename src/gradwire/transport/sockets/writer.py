"""The sending half of a channel over a stream socket: frames in, bytes out.

The first byte of a frame is sent without blocking, because a frame that cannot begin before its
deadline does not leave. One that has begun must be finished, or nothing could follow it; whoever
sends it is kept until its deadline, and then a thread does it.

One thread at a time has the turn to send. A finalizer or a signal handler may interrupt it anywhere
and send, too. So what is begun is where the next sender looks for it, `_unsent` and `_sent`, which
change in the step that sends: see Note [Reading inside a read] in reader.py. The rest goes first.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from threading import get_ident
from typing import Final, TypeAlias, final

from gradwire import threads
from gradwire.errors import GradwireError, PeerLost, UsageError
from gradwire.threads import taking
from gradwire.transport.base import unread_by_deadline
from gradwire.transport.shared_memory import Ancillary, SharedMemory
from gradwire.transport.sockets.stream import INTERRUPTED, Guard, Stream, stalled, story_of
from gradwire.wire.frame import (
    IN_BLOCK,
    NOT_BYTES,
    SMALL,
    Buffer,
    Frame,
    encode_prefix,
    maybe_small,
)

_MOST_PARTS: Final = 1024
_LONGEST_POLL: Final = 3600.0
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_PATIENTLY: Final = int(socket.MSG_NOSIGNAL)
_AT_ONCE_: Final = (_AT_ONCE,)

Unsent: TypeAlias = "bytes | list[Buffer]"


@final
class Outlet:
    """See the top of this file. `sending` is the turn, which `guard` looks at, too."""

    def __init__(
        self,
        sock: Stream,
        guard: Guard,
        sending: threading.Lock,
        remote: str,
        *,
        stall: float,
        flags: int,
        shared: SharedMemory | None,
    ) -> None:
        self._sock, self._guard, self._sending = sock, guard, sending
        self._remote, self._stall, self._flags = remote, stall, flags
        self._shared = shared
        self._small = SMALL if shared is None else min(SMALL, shared.smallest - 1)
        self._taking = taking(sending)
        self._sender = 0
        """the thread that has the turn to send"""
        self._unsent: Unsent | None = None
        """a frame of which a part has left, that is, so many bytes:"""
        self._sent = 0
        self._is_blocked = False
        """whether a send is under way that cannot be interrupted by another"""
        self._is_opaque = not isinstance(sock, socket.socket)

    def send(self, frame: Frame, deadline: float) -> None:
        """Give the frame to the kernel; see `Channel.send`.

        hot: benchmarks of round trips
        """
        small = maybe_small(frame, self._flags, self._small)
        if small is None:
            self._send_large(frame, deadline)
            return
        me = get_ident()
        for has_turn in self._taking:  # noqa: B007
            break
        if has_turn:
            self._sender = me
        elif not self._wait_for_turn(deadline, me):
            self._send_inside([small], (), deadline)
            return
        try:
            try:
                sends = map(self._sock.send, (small,), _AT_ONCE_)
                stock = (small, sends)
                del stock  # see Note [Reading inside a read]
                if self._guard.story is None and self._unsent is None:
                    self._is_blocked = self._is_opaque
                    (sent,) = sends
                    self._is_blocked = False
                    if sent == len(small):
                        return
                    self._sent, self._unsent = sent, small
            except BlockingIOError:
                self._is_blocked = False
            except BaseException as error:
                self._failed_midway(error)
                raise
            if self._unsent is not small:
                self._send([small], (), deadline)
            else:
                self._finish_by(deadline, small)
        finally:
            self._give_up_turn()

    def _send_large(self, frame: Frame, deadline: float) -> None:
        """hot: benchmarks of bandwidth"""
        loan = self._shared.place(frame.payload) if self._shared is not None else None
        if loan is None:
            self.transmit(_parts_of(frame, self._flags), (), deadline)
            return
        with loan:
            prefix = encode_prefix(frame, self._flags | IN_BLOCK)
            self.transmit([prefix, frame.head, loan.note], loan.ancillary, deadline)

    def transmit(self, parts: list[Buffer], ancillary: Ancillary, deadline: float) -> None:
        """Send these, one after the other."""
        if not self._wait_for_turn(deadline, get_ident()):
            self._send_inside(parts, ancillary, deadline)
            return
        try:
            self._send(parts, ancillary, deadline)
        finally:
            self._give_up_turn()

    def _wait_for_turn(self, deadline: float, me: int) -> bool:
        """False if this thread has the turn already, for a send that was interrupted.

        Whose turn it is, is noted by the step that takes it: see Note [Reading inside a read].
        """
        if self._sender == me:
            return False
        left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        (has_turn,) = map(self._sending.acquire, (True,), (left,))
        if has_turn:
            self._sender = me
            return True
        raise unread_by_deadline(self._remote)

    def _send_inside(self, parts: list[Buffer], ancillary: Ancillary, deadline: float) -> None:
        """A finalizer or a signal handler sends while its own thread does.

        If the other frame has begun, the rest of it goes first.
        """
        if self._is_blocked:
            raise UsageError(
                "a finalizer or a signal handler sends while it interrupts its thread in the "
                f"middle of sending to {self._remote}",
                hint="let it put a note into a queue.SimpleQueue, and make the call elsewhere",
            )
        self._send(parts, ancillary, deadline)

    def lend_turn(self) -> bool:
        """See `Channel.lend_turn`. What was interrupted looks anew before each of its steps."""
        if self._sender != get_ident() or self._is_blocked:
            return False
        self._sender = 0
        self._sending.release()
        return True

    def take_turn_back(self) -> None:
        """See `Channel.lend_turn`."""
        me = get_ident()
        # After the end nothing is sent; and in a forked process who has the turn may not be there.
        patience = -1 if self._guard.story is None else 1
        (_,) = map(self._sending.acquire, (True,), (patience,))
        self._sender = me

    def _give_up_turn(self) -> None:
        """What somebody has begun is finished by a thread, which has the turn then."""
        if self._unsent is not None and self._guard.story is None:
            self._finish_later()
            return
        self._unsent = None
        self._is_blocked = False
        self._sender = 0
        self._sending.release()
        if self._guard.story is not None:
            self._guard.settle()

    def _send(self, parts: list[Buffer], ancillary: Ancillary, deadline: float) -> None:
        """Begin it, after what was begun before, and send what can be sent until the deadline."""
        waiting = False
        try:
            while True:
                waiting = True
                if not self._go_on(deadline):
                    raise unread_by_deadline(self._remote)
                waiting = False
                if self._begin(parts, ancillary):
                    break
                waiting = True
                self._wait_for_room(deadline)
            waiting = False
            self._finish_by(deadline, parts)
        except BaseException as error:
            if not waiting:
                self._failed_midway(error)
            raise

    def _finish_by(self, deadline: float, mine: Unsent) -> None:
        """Send what is left of a frame; at the deadline, keep a copy for who sends next."""
        if self._go_on(deadline):
            return
        # The buffers are their sender's again when it returns.
        owned: list[Buffer] = []
        sent = -1
        while self._unsent is mine and self._sent != sent:
            sent = self._sent
            owned = [bytes(part) for part in _after(_listed(mine), sent)]
        if self._unsent is mine:
            self._unsent = owned
            self._sent = 0

    def _failed_midway(self, error: BaseException) -> None:
        """A Ctrl-C may land between the system call and its result being noted.

        Nobody knows how much has left then, so nothing more may follow it.
        """
        if isinstance(error, GradwireError):
            return
        if isinstance(error, OSError):
            raise self._lost_sending(error) from error
        self._guard.end(INTERRUPTED)

    def _go_on(self, deadline: float) -> bool:
        """Send what is begun; False if some is left at the deadline. The peer is slow, if so.

        On the main thread a signal handler could run inside a send that blocks, so it polls.
        """
        blocks = self._unsent is not None and get_ident() != threading.main_thread().ident
        while (unsent := self._unsent) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            sent = self._sent
            is_ready = False
            if blocks and left > self._stall:
                self._push(_PATIENTLY)
            else:
                is_ready = self._poll(min(left, self._stall))
                self._push(_AT_ONCE)
            is_idle = not is_ready and self._unsent is unsent and self._sent == sent
            if is_idle and left > self._stall:
                self._guard.lose(stalled(self._stall))
        return True

    def _finish_later(self) -> None:
        self._sender = 0
        name = f"gradwire send {self._remote}"
        threads.thread(name, self._finish).start()

    def _finish(self) -> None:
        self._sender = get_ident()
        try:
            self._go_on(math.inf)
        except PeerLost:
            pass  # whoever reads finds out
        finally:
            # An interrupt of the sender at the very moment may have given it up, with the channel.
            with suppress(RuntimeError):
                self._give_up_turn()

    def _begin(self, parts: list[Buffer], ancillary: Ancillary) -> bool:
        """Give the kernel what it takes of a new frame; False if that is nothing."""
        if self._guard.story is not None:
            raise PeerLost(self._guard.story)
        length, sends = sum(map(len, parts)), self._sends(parts, ancillary, _AT_ONCE)
        try:
            stock = (parts, parts), (parts, parts, parts)
            del stock
            if self._unsent is not None:
                return False
            self._is_blocked = self._is_opaque
            (sent,) = sends
            self._is_blocked = False
            if sent != length:
                self._sent, self._unsent = sent, parts
        except BlockingIOError:
            self._is_blocked = False
            return False
        except OSError as error:
            raise self._lost_sending(error) from error
        return True

    def _push(self, flags: int) -> None:
        """Give the kernel what it takes of what is begun, unless an inner send does meanwhile."""
        if self._guard.story is not None:
            raise PeerLost(self._guard.story)
        unsent, sent = self._unsent, self._sent
        if unsent is None:
            return
        rest = _after(_listed(unsent), sent)
        length, sends = sum(map(len, rest)), self._sends(rest, (), flags)
        try:
            stock = (rest, rest), (rest, rest, rest)
            del stock
            if self._unsent is not unsent or self._sent != sent:
                return
            self._is_blocked = self._is_opaque or flags == _PATIENTLY
            (count,) = sends
            self._is_blocked = False
            self._sent = sent + count
            if count == length:
                self._unsent = None
        except BlockingIOError:
            self._is_blocked = False
        except OSError as error:
            raise self._lost_sending(error) from error

    def _sends(self, parts: list[Buffer], ancillary: Ancillary, flags: int) -> Iterator[int]:
        if len(parts) == 1:
            return map(self._sock.send, (parts[0],), (flags,))
        return map(self._sock.sendmsg, (parts[:_MOST_PARTS],), (ancillary,), (flags,))

    def _wait_for_room(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise unread_by_deadline(self._remote)
        self._poll(left)

    def _poll(self, left: float) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        return bool(poller.poll(1 + int(1000 * min(left, _LONGEST_POLL))))

    def _lost_sending(self, error: OSError) -> PeerLost:
        self._is_blocked = False
        self._unsent = None  # nothing can follow it
        # A peer that closed may have sent its last answers before: then only sending is
        # over, and recv finds the end by itself.
        if not isinstance(error, ConnectionError):
            self._guard.end(story_of(error))
        return PeerLost(self._guard.story or story_of(error))


def _parts_of(frame: Frame, flags: int) -> list[Buffer]:
    """What goes to the kernel; few parts, as that is the cheaper call."""
    prefix, head = encode_prefix(frame, flags), frame.head
    if len(head) > SMALL:
        return [prefix, head, *frame.payload]
    return [prefix + head, *frame.payload]


def _listed(unsent: Unsent) -> list[Buffer]:
    return unsent if isinstance(unsent, list) else [unsent]


def _after(parts: list[Buffer], sent: int) -> list[Buffer]:
    """What is left of `parts` when so many bytes of it are gone; nothing is copied."""
    for position, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[position + 1 :]]
        sent -= len(part)
    assert sent == 0, NOT_BYTES
    return []
