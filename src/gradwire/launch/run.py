"""`gradwire.run`: a function, and the workers it needs, on this machine.

The driver: starts the plan, hears the processes, asks the state what to make of it, and says so.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar, assert_never, cast

import msgspec

from gradwire.agent.failure import revive
from gradwire.agent.messages import Failure
from gradwire.errors import DeadlinePassed, GradwireError, JoinTimeout, PeerLost, UsageError
from gradwire.launch import child
from gradwire.launch.crew import Crew, Exit, News, Word
from gradwire.launch.luggage import maybe_exception, packed, unpacked
from gradwire.launch.plan import Orders, check, given_in, orders_for
from gradwire.launch.watch_state import (
    Died,
    Failed,
    Overdue,
    Patience,
    Stage,
    Succeeded,
    Verdict,
    Watch,
)
from gradwire.options import Options, Timeouts
from gradwire.rpc.registry import exception_name
from gradwire.rpc.worker import Exposed

T = TypeVar("T")

_GUARD = 'a script calls run() under `if __name__ == "__main__":`, for every worker imports it'
_EXIT_SECONDS = 10.0
"""What a process may take to end after its worker has left."""


def run(
    fn: Callable[..., T],
    world_size: int,
    args: Iterable[object] = (),
    *,
    expose: Exposed = (),
    options: Options | None = None,
    timeout: float | None = None,
) -> T:
    """Start workers w0, w1, … on this machine, call `fn(*args)` on w0 and return its value.

    The others serve it until it returns; what they may run is what `expose` names, as for
    `init_rpc`, and the functions of the script. `fn`, `args`, `expose` and the value are pickled
    between this process and its workers: they arrive as copies, and `fn` must be importable or in a
    script that calls `run` under `if __name__ == "__main__":`.

    The first failure of any worker is raised here, as its original type, with the worker's name and
    traceback: an exception of `fn`, a process that died, one that did not start or leave in time.
    `timeout` limits the whole of it, in seconds. However it ends, no process is left behind.

    What the workers print appears as they print it. How many threads torch uses in each is not
    changed: where workers outnumber cores, set OMP_NUM_THREADS, or torch.set_num_threads in `fn`.

    >>> def main(x):
    ...     with gradwire.context():
    ...         y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
    ...         y.sum().backward()
    ...     return x.grad
    >>> if __name__ == "__main__":
    ...     print(gradwire.run(main, 2, args=(torch.ones(3, requires_grad=True),)))
    """
    _refuse_in_import()
    options = options or Options()
    check(world_size, options, timeout)
    given = packed(
        (fn, tuple(args), tuple(expose)),
        "what run() was given",
        hint="define functions and classes with def and class at the top of a module",
    )
    with tempfile.TemporaryDirectory(prefix="gradwire-run-") as directory, Crew() as crew:
        given_in(Path(directory)).write_bytes(given)
        workers = orders_for(world_size, options, Path(directory))
        watch = Watch(world_size, _patience(options.timeouts, timeout), time.monotonic())
        for orders in workers:
            crew.start(orders.name, child.main, orders)
        verdict = _supervise(crew, watch, workers)
        crew.stop()  # before anything is raised, so that a handler of the error finds none alive
        if not isinstance(verdict, Succeeded):
            _raise(verdict, workers, timeout)
        return cast(T, unpacked(workers[0].returned.read_bytes(), "what the function returned"))


def _refuse_in_import() -> None:
    # A spawned process imports the script before it does anything else, and says so here.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError("run() was called while a worker was importing the script", hint=_GUARD)


def _patience(timeouts: Timeouts, timeout: float | None) -> Patience:
    return Patience(
        start=timeouts.join,
        whole=math.inf if timeout is None else timeout,
        leave=timeouts.shutdown + _EXIT_SECONDS,
    )


def _supervise(crew: Crew, watch: Watch, workers: list[Orders]) -> Verdict:
    while (verdict := watch.verdict(time.monotonic())) is None:
        for news in crew.news(watch.next_deadline() - time.monotonic()):
            _tell(watch, news, workers)
    return verdict


def _tell(watch: Watch, news: News, workers: list[Orders]) -> None:
    now = time.monotonic()
    match news:
        case Exit(worker, status):
            watch.exited(worker, status, now)
        case Word(worker, child.BEGUN):
            watch.begun(worker)
        case Word(_, child.RETURNED):
            watch.returned(now)
        case Word(worker, child.LEFT):
            watch.left(worker)
        case Word(worker, word):
            assert word == child.FAILED, f"w{worker} said {word!r}"
            is_loss = _failure_of(workers[worker]).type_name == exception_name(PeerLost)
            watch.failed(worker, now, of_lost_peer=is_loss)


def _raise(
    verdict: Failed | Died | Overdue, workers: list[Orders], timeout: float | None
) -> NoReturn:
    match verdict:
        case Failed(worker):
            raise _revived(workers[worker]) from None
        case Died(worker, status, stage, felt_by):
            cause = None if felt_by is None else _revived(workers[felt_by])
            raise _death(workers[worker].name, status, stage) from cause
        case Overdue(late, due):
            raise _overdue(", ".join(workers[worker].name for worker in late), due, timeout)
        case _:
            assert_never(verdict)


def _death(name: str, status: int, stage: Stage) -> GradwireError:
    if stage is Stage.STARTING and status > 0:
        return UsageError(
            f"{name} could not start: it ended with {_spoken(status)} while importing the script",
            hint=f"what it printed says why; {_GUARD}",
        )
    when = {
        Stage.STARTING: "while it started",
        Stage.WORKING: "while it was at work",
        Stage.LEAVING: "while it was leaving",
        Stage.LEFT: "after it had left",
    }[stage]
    return PeerLost(f"{name} died ({_spoken(status)}) {when}", hint="what it printed may say why")


def _spoken(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _overdue(names: str, due: Stage, timeout: float | None) -> DeadlinePassed:
    match due:
        case Stage.WORKING:
            return JoinTimeout(
                f"{names} did not start in time",
                hint="each worker imports the script first; a longer Timeouts(join=…) waits longer",
            )
        case Stage.LEFT:
            return DeadlinePassed(
                f"{names} did not end in time after the function had returned",
                hint="something still runs there; a longer Timeouts(shutdown=…) waits longer",
            )
        case _:
            return DeadlinePassed(
                f"run() gave up on {names} after {timeout:g} s",
                hint="a longer timeout= waits longer",
            )


def _failure_of(orders: Orders) -> Failure:
    return msgspec.msgpack.decode(orders.failure.read_bytes(), type=Failure)


def _revived(orders: Orders) -> GradwireError:
    return revive(_failure_of(orders), maybe_exception)
