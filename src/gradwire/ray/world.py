"""`gradwire.ray.workers`: workers on a Ray cluster that the driver calls as one of them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire import threads
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost, UsageError
from gradwire.launch.run import check_arguments, given_to_run
from gradwire.launch.supervise_state import CALLER, RunState
from gradwire.options import Options
from gradwire.ray.job import Job
from gradwire.ray.seat import joined, script_of_driver
from gradwire.ray.seats import Resources, Seats
from gradwire.ray.supervisor import Supervisor
from gradwire.rpc.api import Names, default_name, shutdown
from gradwire.rpc.worker import Exposed

_log = logging.getLogger("gradwire")

_SUPERVISOR_SECONDS = 30.0  # it may be ending an actor


@contextmanager
def workers(
    count: int,
    *,
    resources: Resources | None = None,
    strategy: str = "PACK",
    expose: Exposed = (),
    options: Options | None = None,
    restarts: int = 0,
    names: Names | None = None,
) -> Iterator[list[str]]:
    """Start workers w1, w2, … on a Ray cluster, join them as w0, and give their names.

    >>> with gradwire.ray.workers(8, resources={"GPU": 1}) as names:
    ...     found = [gradwire.rpc_sync(name, measure) for name in names]

    This process is a worker in the block, and calls the others; they run what they run under
    `gradwire.ray.run`. At a prompt or in a notebook there is no script to give them: what they call
    must be in modules there. At the end of the block all leave; if it raises, they are killed.
    """
    options = options or Options()
    check_arguments(count, options, None, restarts)
    if current_worker.maybe_default() is not None:
        raise UsageError("this process is a worker already", hint="call gradwire.shutdown() first")
    given = given_to_run(shutdown, (), expose)  # there is no function to call
    script = script_of_driver()
    called = [(names or default_name)(rank) for rank in range(count + 1)]
    with Seats(count, resources, strategy) as seats:
        seats.reserve(options.timeouts.join)
        state = RunState(
            count + 1,
            time.monotonic(),
            start=options.timeouts.join,
            whole=math.inf,
            leave=math.inf,
            restarts=restarts,
        )
        state.begun(CALLER)
        with Job(called, options, given, script, seats, may_restart=restarts > 0) as job:
            supervisor = Supervisor(called, state, seats, job)
            supervisor.start(range(1, count + 1))
            with _supervised(supervisor, count) as errors:
                _join(job, expose, errors)
                try:
                    yield called[1:]
                except BaseException:
                    _leave(graceful=False)
                    raise
            job.end()
            _leave(graceful=True)


@contextmanager
def _supervised(supervisor: Supervisor, count: int) -> Iterator[list[GradwireError]]:
    """Wait until all have started, and restart those that die in the block.

    The list gets the error of a worker that was not restarted. Calls to it raise PeerLost.
    """
    verdict = supervisor.supervise(until=lambda: len(supervisor.begun) == count)
    if verdict is not None:
        raise supervisor.error_for(verdict)
    errors: list[GradwireError] = []
    is_over = threading.Event()

    def supervise() -> None:
        try:
            verdict = supervisor.supervise(until=is_over.is_set)
            found = None if verdict is None else supervisor.error_for(verdict)
        except UsageError as error:  # the block has called ray.shutdown()
            found = error
        if found is not None:
            errors.append(found)
            _log.error("no worker is restarted any more: %s", found)

    thread = threads.thread(name="gradwire ray supervisor", target=supervise)
    thread.start()
    try:
        yield errors
    finally:
        is_over.set()
        thread.join(_SUPERVISOR_SECONDS)


def _join(job: Job, expose: Exposed, errors: list[GradwireError]) -> None:
    try:
        joined(job.orders(CALLER), job.keys(CALLER), expose)
    except (DeadlinePassed, PeerLost) as error:
        if errors:
            raise errors[0] from error
        raise


def _leave(*, graceful: bool) -> None:
    if current_worker.maybe_default() is not None:  # else the block has called shutdown()
        shutdown(graceful=graceful)
