"""Time in a worker: the clock, deadlines of nested calls, and the thread that watches deadlines.

The timer thread asks each watcher what is late, and sleeps until the earliest deadline that any of
them names. The first deadline starts it, so a worker that waits for nothing has no such thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar, final

from gradwire import threads
from gradwire.options import FOREVER

T = TypeVar("T")

_log = logging.getLogger("gradwire")
_JOIN_SECONDS = 5.0
_RETRY_SECONDS = 1.0


class Clock(Protocol):
    """The time that a worker's deadlines are in. Tests bring a clock that moves when told.

    `time.monotonic` measures what a test cannot wait for in its own time: how long a handler, a
    read or a join takes, and the deadlines of channels.
    """

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def sleep(self, wake: threading.Condition, until: float | None) -> None:
        """Wait on `wake` (held by the caller) until it is notified or the moment has come."""


@final
class MonotonicClock:
    """The clock of the machine."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic  # no function around it: it is called often

    def sleep(self, wake: threading.Condition, until: float | None) -> None:
        """See Clock."""
        left = math.inf if until is None else until - time.monotonic()
        wake.wait(min(max(0.0, left), threading.TIMEOUT_MAX))


# -- deadlines of nested calls

_SHARE = 10
_MOST_SECONDS = 3.0
OUTERMOST = (0, 0.0)
_LEVELS = 300
"""Note [Deadlines of nested calls]: the deadline of the outermost call is what counts. A nested
call ends a little earlier than the call around it, so that its error, which names the late worker,
arrives before the outer call would blame the worker in between. All levels together take a tenth
of the time, and at most three seconds. The first levels take half of it, as few calls go deeper;
the other half is spread over 300 levels, and deeper ones have no margin.
"""


@final
class ShortenedDeadline(float):
    """A deadline that an enclosing call has set, earlier than was asked for."""

    __slots__ = ("asked", "depth", "room")

    depth: int  # how many calls with this deadline, or one derived from it, enclose this one
    room: float  # the seconds that all levels share
    asked: float  # the seconds that were asked for

    def __new__(cls, moment: float, depth: int, room: float, asked: float) -> Self:
        """The moment, with the reason for it."""
        self = super().__new__(cls, moment)
        self.depth, self.room, self.asked = depth, room, asked
        return self


def nested(due: float, now: float, seconds: float) -> float:
    """The end of a wait for so many seconds, inside one that ends at `due`."""
    left = due - now
    if type(due) is ShortenedDeadline:
        depth, room = due.depth, min(max(due.room, 0.0), left)  # a peer sent it: it may be wrong
    else:
        depth, room = 0, min(left / _SHARE, _MOST_SECONDS)
    limit = max(due - room * (_used(depth + 1) - _used(depth)), now + left / 2)
    wanted = now + seconds
    return wanted if wanted <= limit else ShortenedDeadline(limit, depth + 1, room, seconds)


def _used(depth: int) -> float:
    """The part of the room that so many levels use."""
    return 0.5 * (1 - 0.7 ** min(depth, _LEVELS)) + 0.5 * math.sqrt(min(depth / _LEVELS, 1.0))


def extent_of(deadline: float) -> tuple[int, float]:
    """The depth and the room of a deadline, which travel with a call. hot: every call"""
    return (deadline.depth, deadline.room) if type(deadline) is ShortenedDeadline else OUTERMOST


def explain_shortening(deadline: float) -> str:
    """What an error adds about a deadline that is not the one that was asked for."""
    if type(deadline) is not ShortenedDeadline:
        return ""
    asked = f"{deadline.asked:g} s were" if deadline.asked < FOREVER else "no deadline was"
    return f", all that the call around it had left ({asked} asked for)"


# -- the thread

Watcher = Callable[[float], float | None]
"""Given the time, it acts on what is late and returns its next deadline. It must not block."""


@final
class Timer:
    """The thread that watches deadlines; the watchers own the decisions."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self.clock = name, clock
        self.lock = threading.RLock()
        self._wake = threading.Condition(self.lock)
        self._watchers: list[Watcher] = []
        self.armed = math.inf
        """the earliest moment at which it wakes; for a later deadline nobody need call `need`"""
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher."""
        self._watchers.append(watcher)

    def need(self, deadline: float) -> None:
        """Wake at this moment; cheap when an earlier one is already known."""
        if deadline >= self.armed:
            return
        with self.lock:
            if self._closed:
                return
            if self._thread is None:
                # Every wait of the worker depends on this thread to end in time.
                thread = threads.thread(self._name, self._loop, threads.IRREPLACEABLE)
                self._thread = thread
                try:
                    thread.start()
                except BaseException:
                    if thread.ident is None:  # a signal handler has raised before it ran
                        self._thread = None
                    raise
            self._wake.notify()
            self.armed = min(self.armed, deadline)  # last: a signal handler may have raised

    def close(self) -> None:
        """Stop watching and join the thread; idempotent."""
        with self.lock:
            self._closed = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _loop(self) -> None:
        while True:
            with self.lock:
                while not self._closed and self.clock.now() < self.armed:
                    self.clock.sleep(self._wake, None if self.armed == math.inf else self.armed)
                if self._closed:
                    return
                # Before the watchers run: a deadline that is added meanwhile arms the timer again.
                self.armed = math.inf
            with threads.no_collection():  # a finalizer's call would be refused on this thread
                for watcher in self._watchers:
                    try:
                        deadline = watcher(self.clock.now())
                    except Exception:  # every other wait depends on this thread
                        _log.exception("%s: a watcher failed", self._name)
                        deadline = self.clock.now() + _RETRY_SECONDS
                    if deadline is not None:
                        self.need(deadline)


@final
class Resender(Generic[T]):
    """Keeps messages until they are due, then gives them to `send_again`, which must not block."""

    def __init__(self, timer: Timer, send_again: Callable[[list[T]], None]) -> None:
        self._timer, self._send_again = timer, send_again
        self._later: list[tuple[float, T]] = []
        timer.watch(self._expire)

    def keep(self, message: T, seconds: float) -> None:
        """Send it again after so many seconds."""
        when = self._timer.clock.now() + seconds
        with self._timer.lock:
            self._later.append((when, message))
        self._timer.need(when)

    def _expire(self, now: float) -> float | None:
        with self._timer.lock:
            due = [message for when, message in self._later if when <= now]
            self._later = [entry for entry in self._later if entry[0] > now]
            following = min((when for when, _ in self._later), default=None)
        if due:
            self._send_again(due)
        return following
