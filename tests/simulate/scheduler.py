"""One thread at a time, and a time that moves when nobody can run.

Simulated threads are threads of the system, as torch's engine keeps its own books by thread; but
only the one with the baton runs. It hands the baton on where it would block, and sometimes where it
takes a lock, to one that the seed chooses. When nobody can run, the clock jumps to the next moment
for which something was arranged. So a history depends on its seed and on nothing else.

This file must not know workers, links or what the threads do.
"""

from __future__ import annotations

import _thread
import heapq
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, final

from gradwire.errors import GradwireError

_PREEMPTED_EVERY = 60  # the mean number of locks taken between two preemptions
_EXIT_SECONDS = 0.5

_here = threading.local()


class Unwound(BaseException):
    """Raised where a thread blocks whose worker is gone: it ends, and does nothing more."""


class Runaway(RuntimeError):
    """A history that does not come to an end; its message says who was running."""


class Stuck(GradwireError):
    """A program did not end in the time it had, or nothing could happen any more."""


@dataclass(eq=False, slots=True)
class Process:
    """Threads that end together, as those of a worker do when it crashes."""

    name: str
    is_dead: bool = False


class Task:
    """One simulated thread, which its programs take for a `threading.Thread`."""

    process: Process  # from its start on
    ident: int | None = None
    daemon = True

    def __init__(self, scheduler: Scheduler, name: str, target: Callable[[], object]) -> None:
        self.name, self.scheduler, self.target = name, scheduler, target
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.is_unwinding = self.over = False
        self.wait: Wait | None = None
        self.waiters: list[Wait] = []  # those who join it
        self._number = next(scheduler.numbers)

    def __hash__(self) -> int:
        return self._number  # sets of threads are walked in an order that the seed decides

    def join(self, timeout: float | None = None) -> None:
        """As threading.Thread.join."""
        assert self.ident is not None, "it was not started"
        if not self.over and self.scheduler.current is not None:
            self.scheduler.block(self.waiters, self.scheduler.deadline(timeout))

    def is_alive(self) -> bool:
        """As threading.Thread.is_alive."""
        return self.ident is not None and not self.over

    def has_ended(self) -> bool:
        """Whether it was started and does not run again."""
        return self.over or self.process.is_dead


@dataclass(eq=False, slots=True)
class Wait:
    """A thread that waits until it is woken, or for a moment."""

    task: Task
    was_woken: bool | None = None


def here() -> Scheduler | None:
    """The scheduler whose thread is asking, if it is a simulated one."""
    return getattr(_here, "scheduler", None)


@final
class Scheduler:
    """Runs simulated threads one at a time; the thread that made it is not one of them."""

    def __init__(self, seed: int, *, most_switches: int = 200_000) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.switches = 0
        self.errors: list[tuple[str, BaseException]] = []  # what ended a thread, with its name
        self.stage: Any = None
        """what the programs of a history share, for code that does not know which one it is in"""
        self.numbers = count()  # none is given twice
        self._most_switches = most_switches
        self._others = _threads()
        self._ready: list[Task] = []
        self._arranged: list[tuple[float, int, Callable[[], None], Wait | None]] = []
        """when, a number that decides between equals, what, and the wait that it may end"""
        self._at_once: list[Callable[[], None]] = []
        self._tasks: list[Task] = []
        self._outside = _thread.allocate_lock()
        self._outside.acquire()
        self._limit = 0.0
        self._is_done: Callable[[], bool] = lambda: False
        self._until_preempted = 1
        self.current: Task | None = None
        self.is_closed = False

    # -- from outside

    def spawn(self, name: str, process: Process, target: Callable[[], None]) -> Task:
        """A new thread; it begins when the seed chooses it."""
        task = Task(self, name, target)
        self.start(task, process)
        return task

    def start(self, task: Task, process: Process) -> None:
        """Likewise for one that was made before."""
        task.process, task.ident = process, id(task)
        self._tasks.append(task)
        _thread.start_new_thread(self._begin, (task,))
        self._ready.append(task)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let them run until the moment has come or nothing more can happen; True if it is done."""
        self._limit, self._is_done = until, done
        chosen = self._choose()
        if chosen is not None:
            self._pass_to(chosen)
            self._outside.acquire()
            self.current = None
        if self.switches >= self._most_switches:
            raise Runaway(f"no end after {self.switches} switches, at {self.now:.3f} s")
        return done()

    def close(self) -> None:
        """End every thread that is left, one after the other."""
        self.is_closed = True
        self._arranged.clear()
        for task in list(self._tasks):
            if not task.over:
                task.is_unwinding = True
                self._pass_to(task)
                self._outside.acquire()
        self.current = None
        self._tasks.clear()
        # A thread that has handed on the baton for good still needs the interpreter to end; so does
        # what torch keeps for each thread, after Python has forgotten it.
        limit = time.monotonic() + _EXIT_SECONDS
        while _threads() > self._others and time.monotonic() < limit:
            time.sleep(_EXIT_SECONDS / 1000)

    def kill(self, process: Process) -> None:
        """Its threads do not run again."""
        process.is_dead = True
        self._ready = [task for task in self._ready if task.process is not process]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """To look at what threads share as if from outside: no lock is taken inside the block."""
        current, self.current = self.current, None
        try:
            yield
        finally:
            self.current = current

    def waiting(self) -> list[Task]:
        """The threads of living processes that wait."""
        return [task for task in self._tasks if task.wait is not None and not task.has_ended()]

    # -- from simulated threads and from what was arranged

    def at(self, moment: float, act: Callable[[], None], ends: Wait | None = None) -> None:
        """Arrange something that does not block; if it `ends` a wait, only for as long as that."""
        heapq.heappush(self._arranged, (max(moment, self.now), next(self.numbers), act, ends))

    def interrupt(self, act: Callable[[], None]) -> None:
        """Do this where the thread that runs next takes a lock, sends or blocks."""
        self._at_once.append(act)
        self._until_preempted = 0

    def me(self) -> Task:
        """The thread that runs; Unwound if it should have ended."""
        task = self.current
        assert task is not None, "only simulated threads ask"
        if task.is_unwinding:
            raise Unwound
        return task

    def deadline(self, timeout: float | None) -> float:
        """When a wait of so many seconds ends."""
        if timeout is None or not 0 <= timeout < threading.TIMEOUT_MAX:
            return math.inf
        return self.now + timeout

    def block(self, queue: list[Wait], until: float = math.inf) -> bool:
        """Wait in this queue until woken; False if the moment came first."""
        task = self.me()
        wait = task.wait = Wait(task)
        queue.append(wait)
        if until < math.inf:
            self.at(until, lambda: self._wake(wait, False), wait)
        self._hand_on(task)
        task.wait = None
        if not wait.was_woken:
            with suppress(ValueError):
                queue.remove(wait)
        return bool(wait.was_woken)

    def wake(self, queue: list[Wait], n: int = 1) -> None:
        """Let the first n that wait in this queue go on."""
        while queue and n:
            wait = queue.pop(0)
            if wait.was_woken is None:
                self._wake(wait, True)
                n -= 1

    def maybe_preempt(self) -> None:
        """Perhaps another thread runs before this one goes on."""
        self._until_preempted -= 1
        if self._until_preempted <= 0:
            self._until_preempted = self.random.randrange(1, 2 * _PREEMPTED_EVERY)
            task = self.me()
            self._ready.append(task)
            self._hand_on(task)

    # -- the baton

    def _wake(self, wait: Wait, woken: bool) -> None:
        if wait.was_woken is None:
            wait.was_woken = woken
            if not wait.task.process.is_dead:
                self._ready.append(wait.task)

    def _hand_on(self, task: Task) -> None:
        chosen = self._choose()
        if chosen is task:
            return
        self._pass_to(chosen)
        task.baton.acquire()
        if task.is_unwinding:
            raise Unwound

    def _pass_to(self, chosen: Task | None) -> None:
        if chosen is None:
            self._outside.release()
        else:
            self.current = chosen
            chosen.baton.release()

    def _choose(self) -> Task | None:
        """The task that runs next; None if `run` returns."""
        self.switches += 1
        if self.is_closed or self.switches >= self._most_switches or self._is_done():
            return None
        self._interrupted()
        while not self._ready:
            if not self._arranged or self._arranged[0][0] > self._limit:
                self.now = max(self.now, self._limit) if self._arranged else self.now
                return None
            moment, _, act, ends = heapq.heappop(self._arranged)
            if ends is None or ends.task.wait is ends:
                self.now = moment
                act()
                self._interrupted()
                if self._is_done():
                    return None
        ready = self._ready
        if len(ready) > 1:
            place = int(self.random.random() * len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()

    def _interrupted(self) -> None:
        while self._at_once:
            self._at_once.pop(0)()

    def _begin(self, task: Task) -> None:
        task.baton.acquire()
        _here.scheduler = self
        try:
            if not task.is_unwinding:
                task.target()
        except Unwound:
            pass
        except BaseException as error:
            self.errors.append((task.name, error))
        finally:
            del task.target  # what it holds ends in this thread, with the baton
            task.over = True
            self.wake(task.waiters, len(task.waiters))
            self._pass_to(self._choose())


def _threads() -> int:
    """How many this process has; where the system does not say so, those that Python knows."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return _thread._count()
