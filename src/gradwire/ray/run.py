"""`gradwire.ray.run`: start workers on a Ray cluster, and call a function on one of them.

seat.py is what each worker runs, seats.py starts them, and launch/supervise_state.py judges
events, as for `gradwire.run`.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast, final

import msgspec

from gradwire.agent.messages import Failure
from gradwire.agent.remote_errors import revive
from gradwire.errors import JoinTimeout, PeerLost
from gradwire.launch import child, supervise_state
from gradwire.launch.run import EXIT_SECONDS, check_arguments, check_program, given_to_run
from gradwire.launch.supervise_state import (
    Died,
    Failed,
    Overdue,
    RunState,
    Succeeded,
    Verdict,
    WorkerStage,
)
from gradwire.options import Options
from gradwire.ray.job import Job
from gradwire.ray.seat import SERVED, Report, script_of_driver
from gradwire.ray.seats import Resources, Seats
from gradwire.rpc.api import Names, default_name
from gradwire.rpc.codec.pickle_codec import sent_exception
from gradwire.rpc.expose.registry import exception_name
from gradwire.rpc.worker import Exposed

T = TypeVar("T")
_log = logging.getLogger("gradwire")

_KILLED = -signal.SIGKILL


def run(
    fn: Callable[..., T],
    workers: int,
    args: tuple[object, ...] | list[Any] = (),
    *,
    resources: Resources | None = None,
    strategy: str = "PACK",
    expose: Exposed = (),
    options: Options | None = None,
    timeout: float | None = None,
    restarts: int = 0,
    names: Names | None = None,
) -> T:
    """Start workers w0, w1, … on a Ray cluster, call `fn(*args)` on w0 and return its value.

    As `gradwire.run`, but each worker is a Ray actor: it gets `resources`, by default
    `{"CPU": 1}`, in a placement group of this `strategy` (PACK, SPREAD, STRICT_PACK,
    STRICT_SPREAD). This process must be on a node of the cluster; without `ray.init()`, it is
    called here. Waiting for the resources is limited by `Timeouts(join=…)`.

    The workers get the source of the script from here, and run it as spawned processes do: `fn`
    and what peers call may be defined in it, and `run` is called under
    `if __name__ == "__main__":`. Modules that it imports must be on every node.

    With `restarts`, a worker whose actor or node dies is restarted as a new incarnation, where Ray
    finds a place for it. However the run ends, no actor and no placement group is left.

    If all workers are on the node of this process, they use unix sockets. Else they use TLS, with
    certificates made for this run, which needs `cryptography`; or `Options(insecure=True)`.
    """
    began = time.monotonic()
    options = options or Options()
    check_program(fn)
    check_arguments(workers, options, timeout, restarts)
    given, script = given_to_run(fn, args, expose), script_of_driver()
    whole = math.inf if timeout is None else timeout
    called = [(names or default_name)(rank) for rank in range(workers)]
    with Seats(workers, resources, strategy) as seats:
        seats.reserve(min(options.timeouts.join, whole))
        now = time.monotonic()
        state = RunState(
            workers,
            now,
            start=options.timeouts.join,
            whole=whole - (now - began),
            leave=options.timeouts.shutdown + EXIT_SECONDS,
            restarts=restarts,
        )
        with Job(called, options, given, script, seats, may_restart=restarts > 0) as job:
            supervisor = _Supervisor(called, state, seats, job)
            verdict = supervisor.supervise()
            if not isinstance(verdict, Succeeded):
                supervisor.raise_for(verdict, timeout)
            return cast(T, child.unpickled(supervisor.value, "what the function returned"))


@final
class _Supervisor:
    """Passes the events of the actors to the state, and restarts those that it names."""

    def __init__(self, names: list[str], state: RunState, seats: Seats, job: Job) -> None:
        self._names, self._state, self._seats, self._job = names, state, seats, job
        self._failures: dict[int, Failure] = {}
        self._reasons: dict[int, str] = {}
        self.value = b""

    def supervise(self) -> Verdict:
        """Start all workers, and supervise them to the end."""
        for rank in range(len(self._names)):
            self._job.start(rank)
        while (verdict := self._state.verdict(time.monotonic())) is None:
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

    def raise_for(self, verdict: Failed | Died | Overdue, timeout: float | None) -> NoReturn:
        """Raise the error for a run that did not succeed."""
        if isinstance(verdict, Failed):
            raise self._revived(verdict.worker)
        if isinstance(verdict, Overdue):
            if verdict.due is WorkerStage.WORKING:
                raise self._not_started(verdict)
            raise supervise_state.overdue_error(verdict, self._names, timeout)
        name, reason = self._names[verdict.worker], self._reasons[verdict.worker]
        reporter = verdict.reported_by
        raise PeerLost(
            f"{name} died ({reason}) {verdict.stage.value}",
            hint="its output, or `ray logs actor`, may say why",
        ) from (None if reporter is None else self._revived(reporter))

    def _not_started(self, verdict: Overdue) -> JoinTimeout:
        who = ", ".join(self._names[rank] for rank in verdict.workers)
        return JoinTimeout(
            f"{who} did not start in time: {self._seats.shortage()}",
            hint="each worker imports torch and the script first; a longer Timeouts(join=…) waits "
            "longer",
        )

    def _revived(self, rank: int) -> Exception:
        return revive(self._failures[rank], sent_exception)
