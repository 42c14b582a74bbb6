"""What gradwire takes from `threading`, `queue` and `time`, for simulated threads.

Nothing here is locked, as one thread runs at a time. Where a real one would block, it hands the
baton on. Used outside of a history (a finalizer that comes late) they do nothing.

While a history runs, everything that a module of gradwire calls `threading`, `time` or `queue`, or
has taken from `queue`, is replaced: no module need know of it, and a new one is simulated without
being told. Threads that are not simulated get the real thing all the while.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from operator import attrgetter
from types import ModuleType
from typing import Any, final

from gradwire import threads
from gradwire.autograd import scope
from gradwire.autograd.graph import edges, walk
from tests.simulate.scheduler import Scheduler, Task, Unwound, Wait, here


def sleep(scheduler: Scheduler, seconds: float) -> None:
    """As time.sleep."""
    scheduler.block([], scheduler.now + max(0.0, seconds))


class Lock:
    """As threading.Lock."""

    __slots__ = ("_depth", "_is_held", "_scheduler", "_waits")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False
        self._depth = 0  # how often an RLock was taken
        self._waits: list[Wait] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if scheduler.current is None:
            return True
        if scheduler.current.is_unwinding:
            raise Unwound
        scheduler.maybe_preempt()
        until = scheduler.deadline(timeout)
        while self._is_held:
            if not blocking or not scheduler.block(self._waits, until):
                return False
        self._is_held = True
        return True

    def release(self) -> None:
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
        if self._scheduler.current is None:
            return False
        depth = self._lock.let_go()
        try:
            return self._scheduler.block(self._waits, self._scheduler.deadline(timeout))
        finally:
            self._lock.take_back(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = self._scheduler.deadline(timeout)
        while not (result := predicate()):
            if self._scheduler.now >= until:
                break
            self.wait(until - self._scheduler.now)
        return result

    def notify(self, n: int = 1) -> None:
        self._scheduler.wake(self._waits, n)

    def notify_all(self) -> None:
        self._scheduler.wake(self._waits, len(self._waits))


@final
class Event:
    """As threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waits: list[Wait] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._scheduler.wake(self._waits, len(self._waits))

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set and self._scheduler.current is not None:
            self._scheduler.block(self._waits, self._scheduler.deadline(timeout))
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

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = self._scheduler.deadline(timeout)
        while not self._items:
            if not block or not self._scheduler.block(self._waits, until):
                raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Thread(Task):
    """As threading.Thread; belongs to the worker that starts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: None = None,
        target: Callable[..., object] = lambda: None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        super().__init__(scheduler, name or "thread", partial(target, *args, **(kwargs or {})))
        self.daemon = bool(daemon)

    def start(self) -> None:
        self.scheduler.start(self, self.scheduler.me().process)


def thread(
    scheduler: Scheduler, name: str, target: Callable[[], None], duty: threads.Duty | None = None
) -> Thread:
    """As gradwire's own; no collector interrupts what is simulated."""

    def run() -> None:
        threads.mine.duty = duty
        target()

    return Thread(scheduler, name=name, target=run, daemon=True)


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
        cancelled = Event(scheduler)
        self.cancel = cancelled.set

        def later(*args: object, **kwargs: object) -> None:
            if not cancelled.wait(interval):
                function(*args, **kwargs)

        super().__init__(scheduler, target=later, name="timer", args=args, kwargs=kwargs)


# -- in their place


def _either(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """The simulated one for simulated threads, the real one for others."""

    def made(*args: Any, **kwargs: Any) -> Any:
        scheduler = here()
        return real(*args, **kwargs) if scheduler is None else simulated(scheduler, *args, **kwargs)

    made.__name__ = real.__name__
    return made


def _copy(module: ModuleType, *things: Any, **named: Callable[..., Any]) -> ModuleType:
    """The module, with these in the place of what it has under their names."""
    copied = ModuleType(module.__name__)
    vars(copied).update(vars(module))
    for name, thing in ({thing.__name__: thing for thing in things} | named).items():
        setattr(copied, name, _either(getattr(module, name), thing))
    return copied


_ROOM = 20
"""Threads are short-lived here, and programs not deep: room for more is most of a thread's work."""

_now = attrgetter("now")
_instead: dict[int, object] = {
    id(threading): _copy(
        threading, Lock, RLock, Condition, Event, Thread, Timer, current_thread=Scheduler.me
    ),
    id(time): _copy(time, sleep, monotonic=_now, perf_counter=_now, time=_now),
    id(queue): _copy(queue, SimpleQueue),
    id(queue.SimpleQueue): _either(queue.SimpleQueue, SimpleQueue),
    id(threads.thread): _either(threads.thread, thread),
}


@lru_cache(1)
def _places_of_ours(modules: int) -> list[tuple[ModuleType, str, object]]:
    """Looked for again when there are more modules than last time."""
    return _places(
        [module for name, module in list(sys.modules.items()) if name.startswith("gradwire.")]
    )


def _places(modules: list[ModuleType]) -> list[tuple[ModuleType, str, object]]:
    """Where these modules have what is replaced, and what is put there."""
    return [
        (module, name, _instead[id(value)])
        for module in modules
        for name, value in list(vars(module).items())
        if id(value) in _instead
    ]


@contextmanager
def simulated(
    modules: list[ModuleType], on_log: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    """Simulated threads and time in gradwire and in these modules, for the block.

    In it there is no garbage collection, no warning, and nothing is printed of Unwound. `on_log` is
    given what gradwire logs, and says whether it is logged elsewhere.
    """
    log, hook = logging.getLogger("gradwire"), sys.unraisablehook

    def unraisable(what: Any) -> None:
        if not issubclass(what.exc_type, Unwound):
            hook(what)

    changes = [*_places_of_ours(len(sys.modules)), *_places(modules)]
    changes += [(module, "ROOM", _ROOM) for module in (edges, scope, walk)]
    changes.append((sys, "unraisablehook", unraisable))
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing, name, value in changes:
            undo.callback(setattr, thing, name, getattr(thing, name))
            setattr(thing, name, value)
        if gc.isenabled():
            undo.callback(gc.enable)
            gc.disable()
        if hasattr(os, "sched_setaffinity"):
            # One thread runs at a time: on two cores each hand-over would wake the other core.
            allowed = os.sched_getaffinity(0)
            undo.callback(os.sched_setaffinity, 0, allowed)
            os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
        log.addFilter(on_log)
        undo.callback(log.removeFilter, on_log)
        yield
