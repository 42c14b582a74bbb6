"""The state of the workers of a run, and the verdict: whether it succeeded, or why not; no IO.

The first failure ends the run. When a worker dies, the function that was calling it fails too, and
either event may arrive first. The death is the cause. So a failure with PeerLost waits a moment for
the death that explains it, and a death for the failure that it caused.

A worker whose process ended without a report is restarted, if it has restarts left. Exceptions are
a worker that could not import the script, as it would fail again, and one that dies after the
function has returned, as it is no longer needed.

Workers are numbers, time is an argument. Worker 0 runs the function.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import final

from gradwire.errors import DeadlinePassed, GradwireError, JoinTimeout, PeerLost, UsageError

CALLER = 0
LINGER_SECONDS = 1.0


class WorkerStage(Enum):
    """The progress of a worker, and how to say when it died."""

    STARTING = "while it started"
    WORKING = "while it was at work"
    LEAVING = "while it was leaving"
    LEFT = "after it had left"
    FAILED = "after it had failed"


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The function returned, and all workers left in order."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker reported an error."""

    worker: int


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process ended without a report; `reported_by` failed because of it."""

    worker: int
    status: int
    stage: WorkerStage
    reported_by: int | None = None


@dataclass(frozen=True, slots=True)
class Overdue:
    """Workers that did not reach the stage `due` in time."""

    workers: tuple[int, ...]
    due: WorkerStage


Verdict = Succeeded | Failed | Died | Overdue


@final
class RunState:
    """The state of one run.

    The time limits: `start` until all have started, `whole` for the run, `leave` from the return of
    the function to the last exit.
    """

    def __init__(
        self, workers: int, now: float, *, start: float, whole: float, leave: float, restarts: int
    ) -> None:
        self._stages = [WorkerStage.STARTING] * workers
        self._restarts_left = [restarts] * workers
        self._exited: set[int] = set()
        self._start_seconds, self._leave_seconds = start, leave
        self._start_by = [now + start] * workers
        self._end_by = now + whole
        self._leave_by = math.inf
        self._death: Died | None = None
        self._failure: Failed | None = None
        self._explained_at = math.inf  # when the death, or else the failure, is the verdict

    def begun(self, worker: int) -> None:
        """The worker has started, and is about to join."""
        self._stages[worker] = WorkerStage.WORKING

    def returned(self, now: float) -> None:
        """The function has returned; all workers are leaving."""
        self._stages[CALLER] = WorkerStage.LEAVING
        self._leave_by = now + self._leave_seconds

    def left(self, worker: int) -> None:
        """The worker has left, and will exit."""
        self._stages[worker] = WorkerStage.LEFT

    def failed(self, worker: int, now: float, *, of_lost_peer: bool) -> None:
        """The worker reported an error; `of_lost_peer` if a death may explain it."""
        self._stages[worker] = WorkerStage.FAILED
        if self._failure is None:
            self._failure = Failed(worker)
            if self._death is None:
                self._explained_at = now + (LINGER_SECONDS if of_lost_peer else 0.0)

    def exited(self, worker: int, status: int, now: float) -> Died | None:
        """The worker's process ended; returns its death if it is to be restarted."""
        stage = self._stages[worker]
        if self._may_restart(worker, status):
            self._restarts_left[worker] -= 1
            self._stages[worker] = WorkerStage.STARTING
            self._start_by[worker] = now + self._start_seconds
            return Died(worker, status, stage)
        self._exited.add(worker)
        # After the return a worker is no longer needed, if it was one to be restarted before.
        is_over = self._stages[CALLER] in (WorkerStage.LEAVING, WorkerStage.LEFT)
        in_order = (
            stage is WorkerStage.FAILED
            or (stage is WorkerStage.LEFT and status == 0)
            or (is_over and worker != CALLER and self._restarts_left[worker] > 0)
        )
        if self._death is None and not in_order:
            # No failure elsewhere follows the death of the caller, or of one that had not joined.
            causes_failures = worker != CALLER and stage is WorkerStage.WORKING
            self._explained_at = now + (LINGER_SECONDS if causes_failures else 0.0)
            self._death = Died(worker, status, stage)
        return None

    def _may_restart(self, worker: int, status: int) -> bool:
        at_work = (WorkerStage.STARTING, WorkerStage.WORKING)
        could_not_import = self._stages[worker] is WorkerStage.STARTING and status > 0
        return (
            self._restarts_left[worker] > 0
            and self._death is None
            and self._failure is None
            and self._stages[CALLER] in at_work
            and self._stages[worker] in at_work
            and not could_not_import
        )

    def verdict(self, now: float) -> Verdict | None:
        """The verdict on the run; None while it goes on."""
        if self._death is not None and self._failure is not None:
            return replace(self._death, reported_by=self._failure.worker)
        first = self._death or self._failure
        if first is not None:
            return first if now >= self._explained_at else None
        if len(self._exited) == len(self._stages):
            return Succeeded()
        return self._maybe_overdue(now)

    def next_deadline(self) -> float:
        """When to ask for the verdict again if there is no event before."""
        if self._death is not None or self._failure is not None:
            return self._explained_at
        starting = [self._start_by[worker] for worker in self._starting()]
        return min(*starting, self._end_by, self._leave_by)

    def _starting(self) -> list[int]:
        return [w for w, stage in enumerate(self._stages) if stage is WorkerStage.STARTING]

    def _maybe_overdue(self, now: float) -> Overdue | None:
        late = tuple(worker for worker in self._starting() if now >= self._start_by[worker])
        if late:
            return Overdue(late, WorkerStage.WORKING)
        staying = tuple(w for w in range(len(self._stages)) if w not in self._exited)
        if now >= self._leave_by:
            return Overdue(staying, WorkerStage.LEFT)
        if now >= self._end_by:
            is_over = self._stages[CALLER] is not WorkerStage.WORKING
            return Overdue(staying if is_over else (CALLER,), WorkerStage.LEAVING)
        return None


MAIN_GUARD_HINT = (
    'a script calls run() under `if __name__ == "__main__":`, as every worker imports it'
)


def death_error(died: Died, names: Sequence[str]) -> GradwireError:
    """The error for a worker that died."""
    name, how = names[died.worker], describe_exit(died.status)
    if died.stage is WorkerStage.STARTING and died.status > 0:
        return UsageError(
            f"{name} could not start: it ended with {how} while importing the script",
            hint=f"what it printed says why; {MAIN_GUARD_HINT}",
        )
    return PeerLost(f"{name} died ({how}) {died.stage.value}", hint="what it printed may say why")


def overdue_error(late: Overdue, names: Sequence[str], timeout: float | None) -> DeadlinePassed:
    """The error for workers that were too late."""
    who = ", ".join(names[worker] for worker in late.workers)
    if late.due is WorkerStage.WORKING:
        return JoinTimeout(
            f"{who} did not start in time",
            hint="each worker imports the script first; a longer Timeouts(join=…) waits longer",
        )
    if late.due is WorkerStage.LEFT:
        return DeadlinePassed(
            f"{who} did not end in time after the function had returned",
            hint="something still runs there; a longer Timeouts(shutdown=…) waits longer",
        )
    return DeadlinePassed(
        f"run() gave up on {who} after {timeout:g} s", hint="a longer timeout= waits longer"
    )


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
