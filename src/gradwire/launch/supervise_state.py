"""What is known of the workers of a run, and what to make of it: that it succeeded, or why not.

The first failure ends the run. Which one is the first is not told by the order in which news comes
in: when a worker dies, the function that was calling it fails too, and either may be heard of
first. The death is the cause. So a failure that speaks of a lost peer lingers a moment for the
death that explains it, and a death for the failure that says where it was felt.

A worker that may be started again is, when its process ended without a word: `to_restart` says so.
Not one that could not even import the script: that would help nobody. Nor one that dies when the
function has returned: then it is not missed.

Pure: workers are numbers, time is an argument. Worker 0 is the one that runs the function.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from gradwire.errors import DeadlinePassed, GradwireError, JoinTimeout, PeerLost, UsageError

CALLER = 0
LINGER_SECONDS = 1.0


class Stage(Enum):
    """How far a worker has come."""

    STARTING = "starting"
    WORKING = "working"
    LEAVING = "leaving"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: until all have started, for the whole run, from the return until all are gone."""

    start: float
    whole: float
    leave: float


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The function returned, and all have left in order."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker told why it gave up."""

    worker: int


@dataclass(frozen=True, slots=True)
class Died:
    """A worker ended without a word. `felt_by` told of a failure that came of it."""

    worker: int
    status: int
    stage: Stage
    felt_by: int | None


@dataclass(frozen=True, slots=True)
class Overdue:
    """Workers that a wait was given up on, in which stage they were to be by then."""

    workers: tuple[int, ...]
    due: Stage


@dataclass(frozen=True, slots=True)
class Restart:
    """A worker died, of what and when, and is to be started again."""

    worker: int
    status: int
    stage: Stage


Verdict = Succeeded | Failed | Died | Overdue


@dataclass(frozen=True, slots=True)
class _Death:
    worker: int
    status: int
    stage: Stage
    explained_at: float


@dataclass(frozen=True, slots=True)
class _Failure:
    worker: int
    explained_at: float


@final
class Watch:
    """The story of one run so far."""

    def __init__(self, workers: int, patience: Patience, now: float, *, restarts: int = 0) -> None:
        self._stages = [Stage.STARTING] * workers
        self._restarts_left = [restarts] * workers
        self._to_restart: list[Restart] = []
        self._exited: set[int] = set()
        self._patience = patience
        self._start_by = [now + patience.start] * workers
        self._end_by = now + patience.whole
        self._leave_by = math.inf
        self._death: _Death | None = None
        self._failure: _Failure | None = None

    def begun(self, worker: int) -> None:
        """It has started, and is about to join the others."""
        self._stages[worker] = Stage.WORKING

    def returned(self, now: float) -> None:
        """The function is over; everyone is on the way out."""
        self._stages[CALLER] = Stage.LEAVING
        self._leave_by = now + self._patience.leave

    def left(self, worker: int) -> None:
        """It has nothing left to do but to exit."""
        self._stages[worker] = Stage.LEFT

    def failed(self, worker: int, now: float, *, of_lost_peer: bool) -> None:
        """It told why it gives up."""
        self._stages[worker] = Stage.FAILED
        if self._failure is None:
            patience = LINGER_SECONDS if of_lost_peer else 0.0
            self._failure = _Failure(worker, now + patience)

    def exited(self, worker: int, status: int, now: float) -> None:
        """Its process is over."""
        stage = self._stages[worker]
        if self._may_restart(worker, status):
            self._restarts_left[worker] -= 1
            self._stages[worker] = Stage.STARTING
            self._start_by[worker] = now + self._patience.start
            self._to_restart.append(Restart(worker, status, stage))
            return
        self._exited.add(worker)
        in_order = stage is Stage.FAILED or (stage is Stage.LEFT and status == 0)
        in_order = in_order or self._is_not_missed(worker)
        if self._death is None and not in_order:
            # Nobody can have felt the death of one that had not joined, nor tell of the caller's.
            is_felt = worker != CALLER and stage is Stage.WORKING
            patience = LINGER_SECONDS if is_felt else 0.0
            self._death = _Death(worker, status, stage, now + patience)

    def _may_restart(self, worker: int, status: int) -> bool:
        is_going_on = self._death is None and self._failure is None
        at_work = (Stage.STARTING, Stage.WORKING)
        could_not_import = self._stages[worker] is Stage.STARTING and status > 0
        return (
            self._restarts_left[worker] > 0
            and is_going_on
            and self._stages[CALLER] in at_work
            and self._stages[worker] in at_work
            and not could_not_import
        )

    def _is_not_missed(self, worker: int) -> bool:
        """Whether it would be started again, were it not that the function has returned."""
        is_over = self._stages[CALLER] in (Stage.LEAVING, Stage.LEFT)
        return self._restarts_left[worker] > 0 and worker != CALLER and is_over

    def to_restart(self) -> list[Restart]:
        """Who is to be started again, each told once."""
        told, self._to_restart = self._to_restart, []
        return told

    def verdict(self, now: float) -> Verdict | None:
        """How the run ended; None while it goes on."""
        if self._death is not None:
            return self._verdict_of(self._death, now)
        if self._failure is not None:
            return Failed(self._failure.worker) if now >= self._failure.explained_at else None
        if len(self._exited) == len(self._stages):
            return Succeeded()
        return self._maybe_overdue(now)

    def next_deadline(self) -> float:
        """When to ask for the verdict again, if there is no news until then."""
        if self._death is not None:
            return self._death.explained_at
        if self._failure is not None:
            return self._failure.explained_at
        starting = [self._start_by[worker] for worker in self._starting()]
        return min(*starting, self._end_by, self._leave_by, math.inf)

    def _starting(self) -> list[int]:
        return [w for w, stage in enumerate(self._stages) if stage is Stage.STARTING]

    def _verdict_of(self, death: _Death, now: float) -> Died | None:
        if self._failure is not None:
            return Died(death.worker, death.status, death.stage, self._failure.worker)
        if now >= death.explained_at:
            return Died(death.worker, death.status, death.stage, None)
        return None

    def _maybe_overdue(self, now: float) -> Overdue | None:
        late = tuple(worker for worker in self._starting() if now >= self._start_by[worker])
        if late:
            return Overdue(late, Stage.WORKING)
        staying = tuple(w for w in range(len(self._stages)) if w not in self._exited)
        if now >= self._leave_by:
            return Overdue(staying, Stage.LEFT)
        if now >= self._end_by:
            is_over = self._stages[CALLER] is not Stage.WORKING
            return Overdue(staying if is_over else (CALLER,), Stage.LEAVING)
        return None


GUARD = 'a script calls run() under `if __name__ == "__main__":`, for every worker imports it'

WHEN = {
    Stage.STARTING: "while it started",
    Stage.WORKING: "while it was at work",
    Stage.LEAVING: "while it was leaving",
    Stage.LEFT: "after it had left",
}


def death(died: Died, names: Sequence[str]) -> GradwireError:
    """Who died, of what, and when."""
    name, how = names[died.worker], ending(died.status)
    if died.stage is Stage.STARTING and died.status > 0:
        return UsageError(
            f"{name} could not start: it ended with {how} while importing the script",
            hint=f"what it printed says why; {GUARD}",
        )
    return PeerLost(f"{name} died ({how}) {WHEN[died.stage]}", hint="what it printed may say why")


def overdue(late: Overdue, names: Sequence[str], timeout: float | None) -> DeadlinePassed:
    """Whom a wait was given up on, and which."""
    who = ", ".join(names[worker] for worker in late.workers)
    if late.due is Stage.WORKING:
        return JoinTimeout(
            f"{who} did not start in time",
            hint="each worker imports the script first; a longer Timeouts(join=…) waits longer",
        )
    if late.due is Stage.LEFT:
        return DeadlinePassed(
            f"{who} did not end in time after the function had returned",
            hint="something still runs there; a longer Timeouts(shutdown=…) waits longer",
        )
    return DeadlinePassed(
        f"run() gave up on {who} after {timeout:g} s", hint="a longer timeout= waits longer"
    )


def ending(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
