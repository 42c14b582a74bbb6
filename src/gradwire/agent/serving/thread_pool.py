"""An elastic pool of threads, which run the requests of peers.

A thread that waits inside gradwire (for a nested call, an edge, a reference) is not counted, and
another may run in its place. So a call never starves the call it waits for, to any depth, while at
most `limit` functions compute at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from gradwire import threads
from gradwire.threads import call_after_fork

_log = logging.getLogger("gradwire")

Job = Callable[[], object]

_IDLE_KEPT = 4
_IDLE_SECONDS = 5.0


class _CurrentPool(threading.local):
    """The pool whose job each thread runs."""

    pool: ElasticPool | None = None


mine = _CurrentPool()


@final
class ElasticPool:
    """Runs jobs in order of arrival, each on a thread of its own: an idle one or a new one."""

    may_wait = True

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._name, self.limit = name, limit
        self._most = math.inf if limit is None else limit
        self.lock = threading.RLock()  # a finalizer that runs inside it may submit
        self._changed = threading.Condition(self.lock)
        self._jobs: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = self._busy = 0
        self.guests: list[None] = []
        """one for each job on a thread outside the pool; changed in one step: it needs no lock"""
        self._closed = False
        call_after_fork(self)

    @property
    def active(self) -> int:
        """How many jobs run, wait or are queued."""
        with self.lock:
            return len(self._threads) - self._idle + len(self._jobs) + len(self.guests)

    def submit(self, job: Job) -> bool:
        """Queue a job; False, and it never runs, if the pool is closed."""
        with self.lock:
            if self._closed:
                return False
            self._jobs.append(job)
            self._start_one_if_needed()
        return True

    def submit_or_run(self, job: Job) -> None:
        """Queue a job; run it here and now if the pool is closed."""
        if not self.submit(job):
            job()

    def has_room(self) -> bool:
        """Whether one more job could begin at once."""
        if self._closed or self._jobs:
            return False
        return self._busy + len(self.guests) < self._most

    def guest_left(self) -> None:
        """A job that ran on a thread outside the pool is over. hot: every short request"""
        self.guests.pop()
        if self._jobs:  # queued while this one was counted: no thread was started for it
            with self.lock:
                self._start_one_if_needed()

    @property
    def runs_this_thread(self) -> bool:
        """Whether the calling thread runs a job of this pool."""
        return mine.pool is self

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block this thread is not counted, if it runs a job of this pool."""
        if mine.pool is not self:
            yield
            return
        with self.lock:
            self._busy -= 1
            self._start_one_if_needed()
        try:
            yield
        finally:
            # It counts again at once, over the limit if need be: waiting here for a free place
            # could mean waiting for a job that waits for this one.
            with self.lock:
                self._busy += 1

    def close(self, timeout: float, *, drop_queued: bool) -> list[str]:
        """Take no more jobs and join the threads; the names of those that did not end."""
        with self.lock:
            self._closed = True
            if drop_queued:
                self._jobs.clear()
            self._changed.notify_all()
            running = self._threads - {threading.current_thread()}
        deadline = time.monotonic() + timeout
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sorted(thread.name for thread in running if thread.is_alive())

    def forked(self) -> None:
        """In a forked process: the threads are gone, and none is started."""
        self._changed = threading.Condition(self.lock)  # which `WorkerLocks.forked` renews
        self._closed = True
        self._jobs = deque()

    def _start_one_if_needed(self) -> None:
        """With the lock held: wake or start a thread for a queued job, if the limit allows it."""
        room = min(len(self._jobs), self._most - self._busy - len(self.guests))
        if room <= 0:
            return
        if self._idle >= room:
            self._changed.notify()
            return
        thread = threads.thread(f"{self._name} {len(self._threads)}", self._loop, self)
        thread.start()  # with the lock held, see Note [Starting a thread]
        self._threads.add(thread)
        self._idle += 1  # it begins by looking for a job

    def hand_over(self, channel: object) -> threads.Undo:
        """The calling thread is idle, and a finalizer that interrupts it is about to wait."""
        with self.lock:
            self._idle -= 1
            self._start_one_if_needed()

        def idle_again() -> None:
            with self.lock:
                self._idle += 1

        return idle_again

    def _loop(self) -> None:
        duties = threads.mine
        while True:
            with self.lock:
                job = self._maybe_next()
                self._idle -= 1
                duties.duty = None
                if job is None:
                    self._threads.discard(threading.current_thread())
                    return
                self._busy += 1
            mine.pool = self
            try:
                job()
            except BaseException:  # the thread and its place in the count must survive any job
                _log.exception("%s: a job failed", self._name)
            mine.pool = None
            del job  # or it would keep what it holds alive while this thread is idle
            with self.lock:
                self._busy -= 1
                self._idle += 1
                duties.duty = self
                self._start_one_if_needed()

    def _maybe_next(self) -> Job | None:
        """With the lock held: wait for a job and room to run it; None to end the thread."""
        while True:
            if self._jobs and self._busy + len(self.guests) < self._most:
                return self._jobs.popleft()
            if self._closed and not self._jobs:
                return None
            woken = self._changed.wait(_IDLE_SECONDS)
            if not woken and not self._jobs and self._idle > _IDLE_KEPT:
                return None
