"""ParameterLocks: which step may change which parameters, from prepare until commit or abort.

A step locks all of its parameters at once or none, so two steps on one worker never wait for each
other. Over several workers see Note [Locks on many workers], optimizer.py. A lock is taken away
when its worker is lost or its deadline has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from gradwire.agent.requests.timer import Clock
from gradwire.errors import DeadlinePassed
from gradwire.ids import StepId, WorkerId

_POLL_SECONDS = 0.005


@dataclass(slots=True)
class StepLock:
    """The lock of one step on parameters of this worker."""

    step: StepId
    parameters: frozenset[int]
    deadline: float
    undo: Callable[[], None] | None = None
    """drops the prepared step; None until it is prepared"""
    ending: bool = False


@final
class ParameterLocks:
    """The locks that steps hold on the parameters of one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held: dict[StepId, StepLock] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._held)

    def acquire(
        self, step: StepId, parameters: frozenset[int], deadline: float, *, wait: bool
    ) -> StepLock | None:
        """Lock these parameters; None if another step has one of them, unless we `wait`."""
        lock = StepLock(step, parameters, deadline)
        while True:
            with self._lock:
                others = [t for t in self._held.values() if t.parameters & parameters]
                if not others:
                    self._held[step] = lock
                    return lock
                late = [t for t in others if t.undo is not None and not t.ending]
                late = [t for t in late if t.deadline < self._clock.now()]
                if not late:
                    if not wait:
                        return None
                    self._wait(others[0], deadline)
            for other in late:
                self.give_up(other.step)

    def _wait(self, other: StepLock, deadline: float) -> None:
        now = self._clock.now()
        if deadline <= now:
            raise DeadlinePassed(
                f"{other.step} of another optimizer had the same parameters all the time",
                hint="a longer Timeouts(step=…) waits longer",
            )
        seconds = max(_POLL_SECONDS, min(deadline, other.deadline) - now)
        self._waiting += 1
        try:
            self._changed.wait(min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._waiting -= 1

    def ready(self, lock: StepLock, undo: Callable[[], None]) -> bool:
        """Note that the step is prepared; False if it was given up, so the caller must undo it."""
        with self._lock:
            lock.undo = undo
            return not lock.ending

    def claim(self, step: StepId) -> StepLock | None:
        """The lock, for the first caller; None for all others. The first one ends the step."""
        with self._lock:
            lock = self._held.get(step)
            if lock is None or lock.ending:
                return None
            lock.ending = True
            return lock

    def release(self, lock: StepLock) -> None:
        """Unlock, once the step is committed or dropped."""
        with self._lock:
            self._held.pop(lock.step, None)
            if self._waiting:
                self._changed.notify_all()

    def give_up(self, step: StepId) -> None:
        """Drop a prepared step, unless another thread is ending it.

        A step that is still being prepared is only marked; `ready` then returns False.
        """
        lock = self.claim(step)
        if lock is not None and lock.undo is not None:
            lock.undo()
            self.release(lock)

    def worker_lost(self, worker: WorkerId) -> None:
        """Drop the steps that a lost worker had asked for."""
        with self._lock:
            lost = [step for step in self._held if step.worker == worker]
        for step in lost:
            self.give_up(step)
