"""How gradwire starts its threads, and what each of them is there for.

Note [Starting a thread]: the collector may run the user's finalizers on a thread that has just been
started, before it does anything of ours, and such a finalizer may make a call. `Thread.start` waits
for the new thread meanwhile. Whoever starts it may hold a lock that the call needs, or the call may
need the very thing that the thread was started for. So the collector is off from before the start
until the new thread has noted its duty, which takes some microseconds.

A thread that is interrupted by a finalizer while it has a duty hands it over before it waits: see
`ChannelReaders.wait`.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, final

Undo = Callable[[], None]


_NEVER = object()


def taking(lock: threading.Lock) -> Iterator[bool]:
    """Each step of it tries to take the lock, and says whether it has.

    `for has_it in taking: break` takes the lock and notes that in one step for the interpreter, so
    that no interrupt comes between the two, which may come after any call.
    """
    return iter(partial(lock.acquire, False), _NEVER)


class Duty(Protocol):
    """What a thread does for others."""

    @property
    def may_wait(self) -> bool:
        """Whether another one can take its place."""

    def hand_over(self, line: object) -> Undo | None:
        """The calling thread waits for what comes by this line: let another one take its place.

        What is to be called when it goes on, if anything.
        """


class _Mine(threading.local):
    """What each thread knows of itself, for all workers of the process."""

    duty: Duty | None = None


mine = _Mine()


@final
class _Collector:
    """Python's, which is off while any thread starts. Nothing here is locked."""

    def __init__(self) -> None:
        self._starts: list[None] = []
        self._is_off = False
        """by us; if it is off by the user, it stays so"""

    def pause(self) -> None:
        self._starts.append(None)
        if gc.isenabled():
            self._is_off = True
            gc.disable()

    def go_on(self) -> None:
        """One start is over. The last one switches it on; two that do so at once do no harm."""
        if self._starts:  # a forked process has none of the threads that were starting
            self._starts.pop()
        if not self._starts and self._is_off:
            self._is_off = False
            gc.enable()

    def forked(self) -> None:
        self._starts.clear()
        self.go_on()


_collector = _Collector()


@contextmanager
def undisturbed() -> Iterator[None]:
    """The collector interrupts no thread inside the block, which has to be short."""
    _collector.pause()
    try:
        yield
    finally:
        _collector.go_on()


@final
class _Thread(threading.Thread):
    """Goes on collecting once it has its duty."""

    def __init__(self, name: str, target: Callable[[], None], duty: Duty | None) -> None:
        super().__init__(name=name, daemon=True)
        self._go, self._duty = target, duty

    def start(self) -> None:
        """See Note [Starting a thread]."""
        _collector.pause()
        try:
            super().start()
        except RuntimeError:  # there is no thread to be had
            _collector.go_on()
            raise

    def run(self) -> None:
        """Everything that this thread does."""
        mine.duty = self._duty
        go = self._go
        del self._go, self._duty  # or they would live as long as somebody holds the thread
        _collector.go_on()
        go()


class Spawn(Protocol):
    """Starts a thread of a worker."""

    def __call__(self, what: str, target: Callable[[], None], duty: Duty | None = None) -> None:
        """Which is named by what it does."""


def thread(name: str, target: Callable[[], None], duty: Duty | None = None) -> threading.Thread:
    """A thread that is not started yet. It ends with the process."""
    return _Thread(name, target, duty)


@final
class Threads:
    """Those of one worker that last as long as it."""

    def __init__(self, name: str, lock: threading.RLock) -> None:
        self._name, self._lock = name, lock
        self._alive: set[threading.Thread] = set()

    def spawn(self, what: str, target: Callable[[], None], duty: Duty | None = None) -> None:
        """Start one, which is named by what it does."""

        def run() -> None:
            try:
                target()
            finally:
                with self._lock:
                    self._alive.discard(started)

        started = thread(f"{self._name} {what}", run, duty)
        with self._lock:  # or join() could find a thread that cannot be joined yet
            started.start()  # see Note [Starting a thread]
            self._alive.add(started)

    def join(self, seconds: float) -> None:
        """Wait for those that are there, so long for each."""
        with self._lock:
            alive = self._alive - {threading.current_thread()}
        for each in alive:
            each.join(seconds)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collector.forked)
