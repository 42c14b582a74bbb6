"""Supervises the actors of a job: reports go to RunState, lost workers are restarted.

Everything that is decided is decided by launch/supervise_state.py, as for `gradwire.run`.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from typing import final

import msgspec

from gradwire.agent.messages import Failure
from gradwire.agent.remote_errors import revive
from gradwire.errors import GradwireError, JoinTimeout, PeerLost
from gradwire.launch import child, supervise_state
from gradwire.launch.supervise_state import (
    Failed,
    Overdue,
    RunState,
    Succeeded,
    Verdict,
    WorkerStage,
)
from gradwire.ray.job import Job
from gradwire.ray.seat import SERVED, Report
from gradwire.ray.seats import Seats
from gradwire.rpc.codec.pickle_codec import sent_exception
from gradwire.rpc.expose.registry import exception_name

_log = logging.getLogger("gradwire")

_KILLED = -signal.SIGKILL


@final
class Supervisor:
    """Passes the events of the actors to the state, and restarts those that it names."""

    def __init__(self, names: list[str], state: RunState, seats: Seats, job: Job) -> None:
        self._names, self._state, self._seats, self._job = names, state, seats, job
        self._failures: dict[int, Failure] = {}
        self._reasons: dict[int, str] = {}
        self.value = b""
        self.begun: set[int] = set()

    def start(self, ranks: Iterable[int]) -> None:
        """Start these workers."""
        for rank in ranks:
            self._job.start(rank)

    def supervise(self, until: Callable[[], bool] = lambda: False) -> Verdict | None:
        """Supervise the workers to the end, or `until` this is true; then without a verdict."""
        while (verdict := self._state.verdict(time.monotonic())) is None and not until():
            seconds = self._state.next_deadline() - time.monotonic()
            for rank, news in self._seats.events(seconds):
                if isinstance(news, str):
                    self._lost(rank, news)
                else:
                    self._note(rank, news)
        return verdict

    def _lost(self, rank: int, reason: str) -> None:
        self._reasons[rank] = reason
        died = self._state.exited(rank, _KILLED, time.monotonic())
        if died is not None:
            incarnation = self._job.restart(rank)
            text = "%s died (%s) %s; restarted as incarnation %d"
            _log.warning(text, self._names[rank], reason, died.stage.value, incarnation)

    def _note(self, rank: int, report: Report) -> None:
        state, now = self._state, time.monotonic()
        match report:
            case child.BEGUN, _:
                state.begun(rank)
                self.begun.add(rank)
            case child.RETURNED, value:
                self.value = value
                self._job.end()
                state.returned(now)
            case child.LEFT, _:
                state.left(rank)
                state.exited(rank, 0, now)
            case child.FAILED, data if data:
                failure = self._failures[rank] = msgspec.msgpack.decode(data, type=Failure)
                is_lost = failure.type_name == exception_name(PeerLost)
                state.failed(rank, now, of_lost_peer=is_lost)
                state.exited(rank, 1, now)
            case word, _:
                assert word in (SERVED, child.FAILED), f"{self._names[rank]} said {word!r}"

    def error_for(self, verdict: Verdict, timeout: float | None = None) -> GradwireError:
        """The error for a job that did not succeed."""
        assert not isinstance(verdict, Succeeded), "that is no error"
        if isinstance(verdict, Failed):
            return self._revived(verdict.worker)
        if isinstance(verdict, Overdue):
            if verdict.due is WorkerStage.WORKING:
                return self._not_started(verdict)
            return supervise_state.overdue_error(verdict, self._names, timeout)
        name, reason = self._names[verdict.worker], self._reasons[verdict.worker]
        needs = "gradwire must be installed on every node; "
        hint = "its output, or `ray logs actor`, may say why"
        error = PeerLost(
            f"{name} died ({reason}) {verdict.stage.value}",
            hint=needs + hint if verdict.stage is WorkerStage.STARTING else hint,
        )
        if verdict.reported_by is not None:
            error.__cause__ = self._revived(verdict.reported_by)
        return error

    def _not_started(self, verdict: Overdue) -> JoinTimeout:
        who = ", ".join(self._names[rank] for rank in verdict.workers)
        return JoinTimeout(
            f"{who} did not start in time: {self._seats.shortage()}",
            hint="each worker imports torch and the script first; a longer Timeouts(join=…) waits "
            "longer",
        )

    def _revived(self, rank: int) -> GradwireError:
        return revive(self._failures[rank], sent_exception)
