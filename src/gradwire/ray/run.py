"""`gradwire.ray.run`: start workers on a Ray cluster, and call a function on one of them.

seat.py is what each worker runs, seats.py starts them, and supervisor.py restarts those that die.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from gradwire.launch import child
from gradwire.launch.run import EXIT_SECONDS, check_arguments, check_program, given_to_run
from gradwire.launch.supervise_state import RunState, Succeeded
from gradwire.options import Options
from gradwire.ray.job import Job
from gradwire.ray.seat import script_of_driver
from gradwire.ray.seats import Resources, Seats
from gradwire.ray.supervisor import Supervisor
from gradwire.rpc.api import Names, default_name
from gradwire.rpc.worker import Exposed

T = TypeVar("T")


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
            supervisor = Supervisor(called, state, seats, job)
            supervisor.start(range(workers))
            verdict = supervisor.supervise()
            assert verdict is not None, "nothing else ends it"
            if not isinstance(verdict, Succeeded):
                raise supervisor.error_for(verdict, timeout)
            return cast(T, child.unpickled(supervisor.value, "what the function returned"))
