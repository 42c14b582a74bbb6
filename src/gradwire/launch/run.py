"""`gradwire.run`: a function, and the workers it needs, on this machine.

The driver: starts the plan, hears the processes, asks the state what to make of it, and says so.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar, assert_never, cast, final

import msgspec

from gradwire.agent.messages import Failure
from gradwire.agent.peers.secret import write_secret
from gradwire.agent.remote_errors import revive
from gradwire.errors import GradwireError, PeerLost, UsageError
from gradwire.launch import child, verdict_texts
from gradwire.launch.pickled_arguments import maybe_exception, packed, unpacked
from gradwire.launch.plan import (
    Orders,
    check,
    given_in,
    orders_again,
    orders_for,
    secret_in,
)
from gradwire.launch.processes import Crew, Exit, News, Word
from gradwire.launch.supervise_state import (
    Died,
    Failed,
    Overdue,
    Patience,
    Restart,
    Succeeded,
    Verdict,
    Watch,
)
from gradwire.options import Options, Timeouts
from gradwire.rpc.api import positional
from gradwire.rpc.expose.registry import exception_name, listed
from gradwire.rpc.worker import Exposed

T = TypeVar("T")
_log = logging.getLogger("gradwire")

_EXIT_SECONDS = 10.0
"""What a process may take to end after its worker has left."""


def run(
    fn: Callable[..., T],
    world_size: int,
    args: tuple[object, ...] | list[Any] = (),
    *,
    expose: Exposed = (),
    options: Options | None = None,
    timeout: float | None = None,
    restarts: int = 0,
) -> T:
    """Start workers w0, w1, … on this machine, call `fn(*args)` on w0 and return its value.

    The others serve it until it returns; what they may run is what `expose` names, as for
    `init_rpc`, and the functions of the script. `fn`, `args`, `expose` and the value are pickled
    between this process and its workers: they arrive as copies, and `fn` must be importable or in a
    script that calls `run` under `if __name__ == "__main__":`.

    The first failure of any worker is raised here, as its original type, with the worker's name and
    traceback: an exception of `fn`, a process that died, one that did not start or leave in time.
    `timeout` limits the whole of it, in seconds. However it ends, no process is left behind.

    With `restarts`, a worker whose process dies is started again under its name, each of them up to
    so many times, and the others go on. It is a new `gradwire.incarnation`: what the earlier one
    kept is lost, calls and backwards that needed it raise PeerLost, references to it
    StaleIncarnation, and new calls work as soon as it is back; see `retrying`. If w0 itself dies,
    its next life calls `fn(*args)` again, and the other workers have kept their values.

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
    _refuse_without_file(fn)
    options = options or Options()
    check(world_size, options, timeout, restarts)
    given = packed(
        (fn, positional(args), listed(expose)),
        "what run() was given",
        hint="define functions and classes with def and class at the top of a module",
    )
    with tempfile.TemporaryDirectory(prefix="gradwire-run-") as directory, Crew() as crew:
        given_in(Path(directory)).write_bytes(given)
        if options.secret is None:
            write_secret(secret_in(Path(directory)))
        workers = orders_for(world_size, options, Path(directory), comes_back=restarts > 0)
        patience = _patience(options.timeouts, timeout)
        watch = Watch(world_size, patience, time.monotonic(), restarts=restarts)
        verdict = _Supervision(crew, watch, workers).verdict()
        if not isinstance(verdict, Succeeded):
            _raise(verdict, workers, timeout)
        return cast(T, unpacked(workers[0].returned.read_bytes(), "what the function returned"))


def _refuse_in_import() -> None:
    # A spawned process imports the script before it does anything else, and says so here.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "run() was called while a worker was importing the script", hint=verdict_texts.GUARD
        )


def _patience(timeouts: Timeouts, timeout: float | None) -> Patience:
    return Patience(
        start=timeouts.join,
        whole=math.inf if timeout is None else timeout,
        leave=timeouts.shutdown + _EXIT_SECONDS,
    )


@final
class _Supervision:
    """Starts the workers, hears them, and starts again those that the state says."""

    def __init__(self, crew: Crew, watch: Watch, workers: list[Orders]) -> None:
        self._crew, self._watch = crew, watch
        self._workers = workers
        self._worker_of: dict[int, int] = {}
        for worker in range(len(workers)):
            self._start(worker)

    def verdict(self) -> Verdict:
        """Of the whole run."""
        while (verdict := self._watch.verdict(time.monotonic())) is None:
            for news in self._crew.news(self._watch.next_deadline() - time.monotonic()):
                self._tell(news)
            for restart in self._watch.to_restart():
                self._start_again(restart)
        return verdict

    def _start(self, worker: int) -> None:
        orders = self._workers[worker]
        self._worker_of[self._crew.start(orders.name, child.main, orders)] = worker

    def _start_again(self, restart: Restart) -> None:
        orders = self._workers[restart.worker] = orders_again(self._workers[restart.worker])
        how, when = verdict_texts.ending(restart.status), verdict_texts.WHEN[restart.stage]
        life = orders.options.incarnation
        _log.warning("%s died (%s) %s; it is started again, life %d", orders.name, how, when, life)
        self._start(restart.worker)

    def _tell(self, news: News) -> None:
        now, watch, worker = time.monotonic(), self._watch, self._worker_of[news.process]
        match news:
            case Exit(process, status):
                del self._worker_of[process]
                watch.exited(worker, status, now)
            case Word(_, child.BEGUN):
                watch.begun(worker)
            case Word(_, child.RETURNED):
                watch.returned(now)
            case Word(_, child.LEFT):
                watch.left(worker)
            case Word(_, word):
                assert word == child.FAILED, f"w{worker} said {word!r}"
                name = _failure_of(self._workers[worker]).type_name
                watch.failed(worker, now, of_lost_peer=name == exception_name(PeerLost))


def _refuse_without_file(fn: Callable[..., object]) -> None:
    """Each worker is a new process that runs the file of the script again: there must be one."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None and getattr(fn, "__module__", None) == "__main__":
        where = "at a prompt, in a notebook or after `python -c`"
    elif path is not None and main.__spec__ is None and not Path(path).exists():
        where = f"in {path}, which is no file"
    else:
        return
    raise UsageError(
        f"run() was given a program that is written {where}: its workers cannot import it",
        hint="write it to a file, and run that: python program.py",
    )


def _raise(
    verdict: Failed | Died | Overdue, workers: list[Orders], timeout: float | None
) -> NoReturn:
    names = [orders.name for orders in workers]
    match verdict:
        case Failed(worker):
            error = _revived(workers[worker])
            raise error from error.__cause__
        case Died(felt_by=int(worker)):
            raise verdict_texts.death(verdict, names) from _revived(workers[worker])
        case Died():
            raise verdict_texts.death(verdict, names)
        case Overdue():
            raise verdict_texts.overdue(verdict, names, timeout)
        case _:
            assert_never(verdict)


def _failure_of(orders: Orders) -> Failure:
    return msgspec.msgpack.decode(orders.failure.read_bytes(), type=Failure)


def _revived(orders: Orders) -> GradwireError:
    return revive(_failure_of(orders), maybe_exception)
