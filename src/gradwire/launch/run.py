"""`gradwire.run`: a function, and the workers it needs, on this machine.

The driver: starts the plan, hears the processes, asks the state what to make of it, and says so.
"""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar, assert_never, cast

import msgspec

from gradwire.agent.failure import revive
from gradwire.agent.messages import Failure
from gradwire.agent.secret import write_secret
from gradwire.errors import GradwireError, PeerLost, UsageError
from gradwire.launch import child, spoken
from gradwire.launch.crew import Crew, Exit, News, Word
from gradwire.launch.luggage import maybe_exception, packed, unpacked
from gradwire.launch.plan import Orders, check, given_in, orders_for, secret_in
from gradwire.launch.watch_state import (
    Died,
    Failed,
    Overdue,
    Patience,
    Succeeded,
    Verdict,
    Watch,
)
from gradwire.options import Options, Timeouts
from gradwire.rpc.registry import exception_name
from gradwire.rpc.worker import Exposed

T = TypeVar("T")

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
        if options.secret is None:
            write_secret(secret_in(Path(directory)))
        workers = orders_for(world_size, options, Path(directory))
        watch = Watch(world_size, _patience(options.timeouts, timeout), time.monotonic())
        for orders in workers:
            crew.start(orders.name, child.main, orders)
        verdict = _supervise(crew, watch, workers)
        if not isinstance(verdict, Succeeded):
            _raise(verdict, workers, timeout)
        return cast(T, unpacked(workers[0].returned.read_bytes(), "what the function returned"))


def _refuse_in_import() -> None:
    # A spawned process imports the script before it does anything else, and says so here.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "run() was called while a worker was importing the script", hint=spoken.GUARD
        )


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
    names = [orders.name for orders in workers]
    match verdict:
        case Failed(worker):
            raise _revived(workers[worker]) from None
        case Died(felt_by=int(worker)):
            raise spoken.death(verdict, names) from _revived(workers[worker])
        case Died():
            raise spoken.death(verdict, names)
        case Overdue():
            raise spoken.overdue(verdict, names, timeout)
        case _:
            assert_never(verdict)


def _failure_of(orders: Orders) -> Failure:
    return msgspec.msgpack.decode(orders.failure.read_bytes(), type=Failure)


def _revived(orders: Orders) -> GradwireError:
    return revive(_failure_of(orders), maybe_exception)
