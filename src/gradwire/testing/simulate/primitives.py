"""What gradwire takes from `threading`, `queue` and `time`, for simulated threads.

Nothing here is locked, as one thread runs at a time. Where a real one would block, it hands the
baton on. Used outside of a history (a finalizer that comes late) they do nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import Empty
from typing import Any, cast, final

from gradwire import threads
from gradwire.testing.simulate.scheduler import Scheduler, Task, Unwound, Wait


def _until(scheduler: Scheduler, timeout: float | None) -> float | None:
    if timeout is None or timeout < 0 or timeout >= threading.TIMEOUT_MAX:
        return None
    return scheduler.now + timeout


def now(scheduler: Scheduler) -> float:
    """As time.monotonic."""
    return scheduler.now


def sleep(scheduler: Scheduler, seconds: float) -> None:
    """As time.sleep."""
    scheduler.block([], scheduler.now + max(0.0, seconds))


class Lock:
    """As threading.Lock."""

    __slots__ = ("_depth", "_is_held", "_scheduler", "_waits")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False
        self._depth = 0
        """how often an RLock was taken"""
        self._waits: list[Wait] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, in time."""
        scheduler = self._scheduler
        if scheduler.current is None:
            return True
        if scheduler.current.is_unwinding:
            raise Unwound
        scheduler.maybe_preempt()
        if self._is_held:
            if not blocking:
                return False
            until = _until(scheduler, timeout)
            while self._is_held:
                if not scheduler.block(self._waits, until):
                    return False
        self._is_held = True
        return True

    def release(self) -> None:
        """Give it back; the next may have it."""
        if self._scheduler.current is None:
            return  # nor was it taken
        self._is_held = False
        if self._waits:
            self._scheduler.wake(self._waits)

    def let_go(self) -> int:
        """Give it back however often it was taken; returns what `take_back` wants."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        """As it was before `let_go`."""
        self.acquire()
        self._depth = depth

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@final
class RLock(Lock):
    """As threading.RLock."""

    __slots__ = ("_owner",)

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._owner: Task | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, or take it once more."""
        me = self._scheduler.current
        if me is None:
            return True
        if self._owner is not me:
            if not super().acquire(blocking, timeout):
                return False
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        """Give it back, if it was taken as often."""
        if self._scheduler.current is None:
            return
        self._depth -= 1
        if self._depth <= 0:
            self._owner, self._depth = None, 0
            super().release()

    def _is_owned(self) -> bool:
        """For gradwire/threads.py."""
        return self._owner is not None and self._owner is self._scheduler.current


@final
class Condition:
    """As threading.Condition."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = RLock(scheduler) if lock is None else lock
        self._waits: list[Wait] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Until notified; False if that took too long."""
        if self._scheduler.current is None:
            return False
        depth = self._lock.let_go()
        try:
            return self._scheduler.block(self._waits, _until(self._scheduler, timeout))
        finally:
            self._lock.take_back(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:  # noqa: ANN401
        """Until it is true; what it gave last."""
        until = _until(self._scheduler, timeout)
        while not (result := predicate()):
            if until is not None and self._scheduler.now >= until:
                break
            self.wait(None if until is None else until - self._scheduler.now)
        return result

    def notify(self, n: int = 1) -> None:
        """Wake so many."""
        self._scheduler.wake(self._waits, n)

    def notify_all(self) -> None:
        """Wake all."""
        self._scheduler.wake(self._waits, len(self._waits))


@final
class Event:
    """As threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waits: list[Wait] = []

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened."""
        self._is_set = True
        self._scheduler.wake(self._waits, len(self._waits))

    def clear(self) -> None:
        """It has not happened."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Until it happens; whether it has."""
        if not self._is_set and self._scheduler.current is not None:
            self._scheduler.block(self._waits, _until(self._scheduler, timeout))
        return self._is_set


@final
class SimpleQueue:
    """As queue.SimpleQueue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waits: list[Wait] = []

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        """Add it; never blocks, and hands no baton on: finalizers call it."""
        self._items.append(item)
        self._scheduler.wake(self._waits)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ANN401
        """The first, or Empty."""
        until = _until(self._scheduler, timeout)
        while not self._items:
            if not block or not self._scheduler.block(self._waits, until):
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:  # noqa: ANN401
        """The first, if it is there."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Whether there is none."""
        return not self._items

    def qsize(self) -> int:
        """How many there are."""
        return len(self._items)


class Thread:
    """As threading.Thread; belongs to the worker that starts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._target, self._args, self._kwargs = target, tuple(args), dict(kwargs or {})
        self.name, self.daemon = name or "thread", bool(daemon)
        self._task: Task | None = None
        self._number = next(scheduler.numbers)

    def __hash__(self) -> int:
        return self._number  # sets of threads are walked in an order that the seed decides

    def start(self) -> None:
        """Let it run."""
        scheduler = self._scheduler
        self._task = scheduler.spawn(self.name, scheduler.me().process, self._run)
        self._task.thread = self

    def _run(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        task = self._task
        assert task is not None, "it was not started"
        if not task.over and self._scheduler.current is not None:
            self._scheduler.block(task.waiters, _until(self._scheduler, timeout))

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._task is not None and not self._task.over

    @property
    def ident(self) -> int | None:
        """A number of its own."""
        return None if self._task is None else id(self._task)


def thread(
    scheduler: Scheduler, name: str, target: Callable[[], None], duty: threads.Duty | None = None
) -> Thread:
    """As gradwire's own; no collector interrupts what is simulated."""

    def run() -> None:
        threads.mine.duty = duty
        target()

    return Thread(scheduler, name=name, target=run, daemon=True)


def current_thread(scheduler: Scheduler) -> Thread:
    """The one that asks."""
    task = scheduler.me()
    if task.thread is None:
        task.thread = Thread(scheduler, name=task.name)
        task.thread._task = task
    return cast(Thread, task.thread)


@final
class Timer(Thread):
    """As threading.Timer."""

    def __init__(
        self,
        scheduler: Scheduler,
        interval: float,
        function: Callable[..., object],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._cancelled = Event(scheduler)

        def later(*args: object, **kwargs: object) -> None:
            if not self._cancelled.wait(interval):
                function(*args, **kwargs)

        super().__init__(scheduler, target=later, name="timer", args=args, kwargs=kwargs)

    def cancel(self) -> None:
        """It will not be called."""
        self._cancelled.set()
