"""Requests without an answer yet: the promise of an outcome, and the table of all of them.

A request leaves the table exactly once: answered, late, lost or withdrawn. The caller that took it
out settles its promise. An answer that finds nothing is late, and what it holds is to be released;
or it is the second one to its request, and what it holds is in use since the first.

Neither has a lock, see Note [One step of the interpreter]: a finalizer may interrupt a thread here,
and settle, wait or send on the same thread.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count, repeat
from typing import Any, Generic, TypeVar, final

import msgspec

from gradwire.agent.requests.timer import Clock, explain_shortening, nested
from gradwire.current import get_current
from gradwire.errors import (
    ArgumentTypeError,
    BadMessage,
    CallTimeout,
    Cancelled,
    DeadlinePassed,
    NotTrusted,
    PeerLost,
    UsageError,
)
from gradwire.ids import CallId, WorkerId
from gradwire.options import DEFAULT, FOREVER, Timeout

T = TypeVar("T")

_log = logging.getLogger("gradwire")
_GIVEN_UP_REMEMBERED = 1 << 14


@final
class Promise(Generic[T]):
    """A value that is set once; the first `settle` wins.

    Waiting has no deadline of its own: the maker of a promise settles it in time (the agent by its
    timer), so that the error can say what was waited for.

    The thread that pops the token settles. A waiter adds itself, then checks `settled`; the
    settling thread sets `settled`, then looks at the list. So at least one of the two sees the
    other. If both see a callback, the one that removes it from the list calls it.

    A signal handler may raise after any call (Ctrl-C does), also in the thread that settles for
    another one. So no call comes between the pop of the token and `settled`: the loop does both as
    one step of the interpreter. The waiters and callbacks that are left then are still told, and a
    callback that was interrupted is called again: twice is better than never.
    """

    __slots__ = ("_callbacks", "_token", "_waiters", "outcome", "request", "settled")

    request: int  # the number of the request that it is for; set only for those of `Agent.request`

    def __init__(self) -> None:
        self._token = [None]
        self.settled = False  # whether the outcome is there; read-only for others
        self.outcome: T | None = None  # once it is settled; read-only for others
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[T], object]] = []

    def settle(self, outcome: T) -> bool:
        """Set the outcome; False if there was one already. Callbacks run on this thread."""
        try:
            for _ in map(list.pop, (self._token,)):
                break
        except IndexError:
            return False
        self.outcome = outcome
        self.settled = True
        try:
            self._tell()
        except BaseException:
            self._tell()
            raise
        return True

    def _tell(self) -> None:
        for waiter in tuple(self._waiters):
            with suppress(RuntimeError):  # it was released before an interrupt
                waiter.release()
        if not self._callbacks:
            return
        with suppress(IndexError):  # none is left; on_settled() may have removed one, and calls it
            for callback in map(list.pop, repeat(self._callbacks), repeat(0)):  # one step
                try:
                    callback(self.outcome)  # type: ignore[arg-type]  # it is settled
                except Exception:  # the other callbacks must still run
                    _log.exception("a callback failed")
                except BaseException:  # perhaps before it began: `settle` calls it again
                    self._callbacks.append(callback)
                    raise

    def wait(self, timeout: float | None = None) -> T:
        """Block until it is settled. A signal (Ctrl-C) interrupts; TimeoutError after `timeout`."""
        if not self.settled:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            limit = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            if not self.settled and not waiter.acquire(timeout=limit):
                self._waiters.remove(waiter)
                raise TimeoutError
        return self.outcome  # type: ignore[return-value]  # settled, so it is a T

    def on_settled(self, callback: Callable[[T], object]) -> None:
        """Call `callback` with the outcome: now if it is there, else on the thread that settles."""
        if not self.settled:
            self._callbacks.append(callback)
            if not self.settled:
                return
            try:
                self._callbacks.remove(callback)
            except ValueError:  # settle() has removed it, and calls it
                return
        callback(self.outcome)  # type: ignore[arg-type]  # settled, so it is a T

    def forget(self, callback: Callable[[T], object]) -> None:
        """Do not call `callback`, unless that has begun."""
        with suppress(ValueError):
            self._callbacks.remove(callback)


class Pending(msgspec.Struct, eq=False):
    """One request without an answer, and the errors it may end with, on the worker `me`."""

    peer: WorkerId
    description: str
    opened: float
    deadline: float
    promise: Promise[Any]
    phase: str = "call"
    inbound: Any = None  # the request of a peer that it is made for, which is being served here
    notify_cancel: bool = False  # send the peer a Cancel if nobody waits for the answer any more
    via: object = None  # the channel it is sent on, once known: if that ends, the request fails
    n: int = 0  # its number, set by `RequestTable.opened`
    size: int = 0  # its bytes in the window of calls in flight; see `PeerLimit.maybe_count`
    has_left: bool = False  # whether the peer gets it, unless the connection ends

    def late(self, name: str, me: WorkerId, silence: float) -> CallTimeout:
        """The deadline has passed; `silence` is for how long the worker has sent nothing at all."""
        silent = f"; it has given no sign of life for {silence:.3g} s" if silence else ""
        within = f"within {max(0.0, float(f'{self.deadline - self.opened:.2g}')):g} s"
        cut = explain_shortening(self.deadline)
        longer = "the outermost call" if cut else "the call, or Timeouts(call=…) in the options"
        error = CallTimeout(
            f"{name} did not answer {self._spoken(me)} {within}{cut}{silent}",
            hint=f"a longer timeout= on {longer} waits more",
        )
        return error.about(name, phase=self.phase)

    def lost(self, name: str, me: WorkerId, reason: Exception, link: str, now: float) -> PeerLost:
        """The link that it was sent over has ended."""
        where = f"[{self.phase}, {link}, {now - self.opened:.3g} s after it was made]"
        error = PeerLost(f"{name} was lost before answering {self._spoken(me)}: {reason} {where}")
        return error.about(name, link=link, phase=self.phase)

    def cancelled(self, name: str, me: WorkerId, why: str) -> Cancelled:
        """Nobody waits for the answer any more."""
        error = Cancelled(f"{self._spoken(me)} on {name} was cancelled: {why}")
        return error.about(name, phase=self.phase)

    def _spoken(self, me: WorkerId) -> str:
        return f"{CallId(me, self.n)} ({self.description})"


@final
class RequestTable:
    """The requests of one worker that have no answer yet. Pure: time is an argument.

    `dict.pop` gives a request to one of two threads, and a scan works on a copy. A scan is made
    when the timer wakes, a channel ends or a served request is cancelled. A heap of deadlines would
    make the first cheaper, and every call dearer: it would hold what was answered long ago.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, Pending] = {}
        self.maybe = self._pending.get
        """the request of this number, unless it was taken out"""
        self._given_up: dict[int, None] = {}  # those whose answer may still come

    def __len__(self) -> int:
        return len(self._pending)

    def opened(self, pending: Pending) -> int:
        """Add a request that is about to be sent; its number."""
        n = pending.n = next(self._numbers)
        self._pending[n] = pending
        return n

    def all(self) -> list[Pending]:
        """All of them, oldest first."""
        return [*self._pending.copy().values()]

    def __contains__(self, n: int) -> bool:
        return n in self._pending

    def answered(self, n: int, by: WorkerId | None = None) -> Pending | None:
        """Take out the request that this answers; None if nobody waits for it any more.

        `by` is the worker that answers: BadMessage unless it is the one that was asked.
        """
        pending = self._pending.get(n)
        if pending is None:
            return None
        if by != pending.peer and by is not None:
            raise BadMessage(f"w{by} answers request {n}, which it was not asked")
        return self._pending.pop(n, None)  # of two callers, one gets it

    def expire(self, now: float) -> tuple[list[Pending], float | None]:
        """Take out the requests whose deadline is over; the next deadline of the others."""
        late, following = [], None
        for pending in self._pending.copy().values():
            if pending.deadline <= now:
                late.append(pending)
            elif following is None or pending.deadline < following:
                following = pending.deadline
        return self._given_up_of(late), following

    def channel_lost(self, channel: object) -> list[Pending]:
        """Take out the requests that were sent on this channel."""
        return self._taken([p for p in self._pending.copy().values() if p.via is channel])

    def made_for(self, inbound: set[Any]) -> list[Pending]:
        """Take out the requests that were made while serving these requests of peers."""
        made = [p for p in self._pending.copy().values() if p.inbound in inbound]
        return self._given_up_of(made)

    def cancelled(self, n: int) -> list[Pending]:
        """Take out a request whose caller does not wait any more; empty if it was answered."""
        pending = self._pending.get(n)
        return self._given_up_of([] if pending is None else [pending])

    def since(self, promise: Promise[Any]) -> float | None:
        """When the request of this promise was made; None if it has ended, or there was none."""
        pending = self._pending.get(getattr(promise, "request", 0))
        return None if pending is None or pending.promise is not promise else pending.opened

    def is_late(self, n: int) -> bool:
        """Whether this is the first answer to a request that was given up before it came."""
        return self._given_up.pop(n, self) is None

    def closed(self) -> list[Pending]:
        """Take out all of them, because this worker stops."""
        return self._taken(self.all())

    def _given_up_of(self, found: list[Pending]) -> list[Pending]:
        """Take these out, and remember them until their answer comes, if it ever does."""
        for pending in found:
            self._given_up[pending.n] = None  # first: its answer may come on another thread
        taken = self._taken(found)
        if len(taken) < len(found):
            for n in {p.n for p in found} - {p.n for p in taken}:
                self._given_up.pop(n, None)
        if len(self._given_up) > _GIVEN_UP_REMEMBERED:
            for n in [*self._given_up.copy()][: _GIVEN_UP_REMEMBERED // 2]:
                self._given_up.pop(n, None)
        return taken

    def _taken(self, found: list[Pending]) -> list[Pending]:
        return [pending for pending in found if self._pending.pop(pending.n, None) is not None]


def unsent(name: str, what: str, phase: str, error: BaseException) -> BaseException:
    """A message could not be sent: add the peer and the phase to the error."""
    kind: type[PeerLost | CallTimeout] = CallTimeout
    if isinstance(error, PeerLost):
        kind = NotTrusted if isinstance(error, NotTrusted) else PeerLost
        text = f"{name} was lost before {what} reached it: {error.message}"
    elif isinstance(error, DeadlinePassed):
        text = f"{what} did not leave for {name} in time: {error.message}"
    else:
        return error
    phase = error.phase or phase
    return kind(f"{text} [{phase}]", hint=error.hint).about(name, link=error.link, phase=phase)


# -- the deadline of a wait

Deadline = Callable[[Timeout], float]
"""`deadline_from` with the clock and the default of one worker"""


def _seconds(timeout: object) -> float:
    """As a float: numpy's numbers are not sent. hot: each call with a timeout"""
    if type(timeout) is float:
        return timeout
    try:
        return float(timeout)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"timeout={timeout!r:.80} is not a number of seconds",
            hint="timeout=None waits as long as the other worker lives",
        ) from error


def deadline_from(clock: Clock, default: float, timeout: Timeout) -> float:
    """The deadline of a wait that begins now; never later than that of the call being served.

    Raises CallTimeout if that one has passed, Cancelled if the call was cancelled. hot: each call
    """
    if timeout is DEFAULT:
        seconds = default
    else:
        seconds = FOREVER if timeout is None else min(_seconds(timeout), FOREVER)
        if not seconds > 0:
            raise UsageError(
                f"timeout={timeout!r} is not a positive number of seconds",
                hint="timeout=None waits as long as the other worker lives",
            )
    now = clock.now()
    _, due, inbound, _, _ = get_current()
    if inbound is not None and inbound.cancelled:
        raise Cancelled(f"the enclosing call was cancelled: {inbound.cancelled}")
    if due == math.inf:
        return now + seconds
    if due <= now:
        raise CallTimeout("the deadline of the enclosing call has passed")
    return nested(due, now, seconds)
