"""Whose turn it is to step which parameters: from prepare until commit or abort.

A turn is taken for all parameters of a step at once, or not at all, so two steps on one worker
never wait for each other; over several workers see Note [Turns on many workers], optimizer.py. A
turn whose worker is lost or whose time is over is taken back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

from gradwire.agent.requests.timer import Clock
from gradwire.errors import DeadlinePassed
from gradwire.ids import WorkerId

_POLL_SECONDS = 0.005


class StepId(NamedTuple):
    """One step, numbered by the worker that asked for it."""

    worker: WorkerId
    n: int

    def __str__(self) -> str:
        return f"s{self.worker}.{self.n}"


@dataclass(slots=True)
class Turn:
    """One step's hold on parameters here."""

    step: StepId
    parameters: frozenset[int]
    deadline: float
    undo: Callable[[], None] | None = None
    """how to drop what was prepared; None until it is"""
    ending: bool = False

    def is_late(self, now: float) -> bool:
        """Whether somebody else may end it."""
        return self.deadline < now and self.undo is not None and not self.ending


@final
class Turns:
    """The turns of one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turns: dict[StepId, Turn] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._turns)

    def take(
        self, step: StepId, parameters: frozenset[int], deadline: float, *, wait: bool
    ) -> Turn | None:
        """A turn over these; None if another step has one of them and we are not to wait."""
        turn = Turn(step, parameters, deadline)
        while True:
            with self._lock:
                others = [t for t in self._turns.values() if t.parameters & parameters]
                if not others:
                    self._turns[step] = turn
                    return turn
                late = [t for t in others if t.is_late(self._clock.now())]
                if not late and not wait:
                    return None
                if not late:
                    self._wait(others[0], deadline)
            for other in late:
                self.give_up(other.step)

    def _wait(self, other: Turn, deadline: float) -> None:
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

    def ready(self, turn: Turn, undo: Callable[[], None]) -> bool:
        """The step is prepared; False if it was given up meanwhile, and is to be undone."""
        with self._lock:
            turn.undo = undo
            return not turn.ending

    def claim(self, step: StepId) -> Turn | None:
        """The turn, for whoever is to end it: that is for the first who asks."""
        with self._lock:
            turn = self._turns.get(step)
            if turn is None or turn.ending:
                return None
            turn.ending = True
            return turn

    def release(self, turn: Turn) -> None:
        """What was prepared has been kept or dropped: the next one may step."""
        with self._lock:
            self._turns.pop(turn.step, None)
            if self._waiting:
                self._changed.notify_all()

    def give_up(self, step: StepId) -> None:
        """Drop what a step has prepared, unless somebody else is about to end it."""
        turn = self.claim(step)
        if turn is not None and turn.undo is not None:
            turn.undo()
            self.release(turn)

    def worker_lost(self, worker: WorkerId) -> None:
        """Nobody will end the steps that it has asked for."""
        with self._lock:
            lost = [step for step in self._turns if step.worker == worker]
        for step in lost:
            self.give_up(step)
