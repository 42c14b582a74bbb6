"""`gradwire.run`: start workers on this machine, and call a function on one of them.

child.py is what each worker runs, processes.py starts them, and supervise_state.py judges events.
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
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from gradwire.agent.messages import Failure
from gradwire.agent.peers.secret import write_secret
from gradwire.agent.remote_errors import revive
from gradwire.errors import GradwireError, PeerLost, UsageError
from gradwire.ids import LAST_INCARNATION
from gradwire.launch import child, in_place, supervise_state
from gradwire.launch.child import WorkerSpec, pickled, unpickled
from gradwire.launch.processes import ProcessGroup, StartMethod
from gradwire.launch.startup_line import StartupLine
from gradwire.launch.supervise_state import Died, Failed, Overdue, RunState, Succeeded, Verdict
from gradwire.options import Options, place_from_environment, workers_from_environment
from gradwire.rpc.api import Names, positional
from gradwire.rpc.codec.pickle_codec import sent_exception
from gradwire.rpc.expose.registry import exception_name, listed
from gradwire.rpc.worker import Exposed

T = TypeVar("T")
_log = logging.getLogger("gradwire")

EXIT_SECONDS = 10.0  # for a process to exit after its worker has left


def run(
    fn: Callable[..., T],
    world_size: int | None = None,
    args: tuple[object, ...] | list[Any] = (),
    *,
    expose: Exposed = (),
    options: Options | None = None,
    timeout: float | None = None,
    restarts: int = 0,
    names: Names | None = None,
    start_method: StartMethod = "forkserver",
    page: bool = False,
) -> T:
    """Start workers w0, w1, … on this machine, call `fn(*args)` on w0 and return its value.

    If a launcher has started this process (torchrun, srun, Kubernetes; see
    docs/guide/beyond-one-machine.md), no process is started. This one becomes the worker of its
    rank: rank 0 calls `fn`, and in the others `run` serves it and returns None. `world_size` may be
    left out then; it must be the number of processes that the launcher has started.

    The others serve calls until it returns. They run what `expose` names, as for `init_rpc`, and
    the functions of the script. `fn`, `args`, `expose` and the value are pickled between this
    process and its workers: they arrive as copies, and `fn` must be importable or in a script that
    calls `run` under `if __name__ == "__main__":`.

    The first failure of any worker is raised here, as its original type, with the worker's name and
    traceback: an exception of `fn`, a process that died, one that did not start or leave in time.
    `timeout` limits the whole run, in seconds. However it ends, no process is left behind.

    With `restarts`, a worker whose process dies is restarted under its name, each worker up to that
    many times, and the others go on. It is a new incarnation (`gradwire.incarnation`). Its state is
    lost; calls and backward passes that needed it raise PeerLost, references to it raise
    StaleIncarnation, and new calls work as soon as it has joined; see `retrying`. If w0 dies, its
    next incarnation calls `fn(*args)` again; the other workers keep their state.

    One process imports torch and gradwire, and the workers are forks of it, which start and restart
    in milliseconds. It starts no threads and initializes no GPU; if something that it imports does,
    or with `start_method="spawn"`, each worker is a new process that imports torch itself.

    `names(rank)` are other names than w0, w1, and so on.

    With `page`, w0 serves a page that shows live what all workers do; see `serve_page`.

    The output of the workers appears as they print it; on a terminal each line begins with the name
    of its worker (`Options(output=…)`). If they take more than a second to start, a
    terminal shows how many have done so. The number of threads that torch uses is not
    changed: with more workers than cores, set OMP_NUM_THREADS, or call torch.set_num_threads in
    `fn`.

    >>> def main(x):
    ...     with gradwire.context():
    ...         y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
    ...         y.sum().backward()
    ...     return x.grad
    >>> if __name__ == "__main__":
    ...     print(gradwire.run(main, 2, args=(torch.ones(3, requires_grad=True),)))
    """
    options = options or Options()
    place = place_from_environment()
    if place is not None:
        in_place.check(place, world_size, timeout, restarts, options)
        return in_place.run_in_place(place, fn, positional(args), expose, options, names, page)
    check_program(fn)
    world_size = _size(world_size)
    check_arguments(world_size, options, timeout, restarts)
    job = given_to_run(fn, args, expose)
    state = RunState(
        world_size,
        time.monotonic(),
        start=options.timeouts.join,
        whole=math.inf if timeout is None else timeout,
        leave=options.timeouts.shutdown + EXIT_SECONDS,
        restarts=restarts,
    )
    with (
        tempfile.TemporaryDirectory(prefix="gradwire-run-") as directory,
        StartupLine(world_size) as line,
        ProcessGroup(start_method, options.timeouts.join, line.show) as group,
    ):
        workers = _prepared(Path(directory), job, world_size, options, restarts, names, page)
        verdict = _supervise(group, state, workers, line)
        if not isinstance(verdict, Succeeded):
            _raise(verdict, workers, timeout)
        return cast(T, unpickled(workers[0].returned.read_bytes(), "what the function returned"))


def given_to_run(fn: Callable[..., object], args: object, expose: Exposed) -> bytes:
    """What workers are to do, as a pickle."""
    return pickled(
        (fn, positional(args), listed(expose)),
        "what run() was given",
        hint="define functions and classes with def and class at the top of a module",
    )


def _prepared(
    home: Path,
    given: bytes,
    world_size: int,
    options: Options,
    restarts: int,
    names: Names | None,
    page: bool = False,
) -> list[WorkerSpec]:
    """Write what the workers need into the directory of the run; what each is told."""
    (home / child.ARGUMENTS).write_bytes(given)
    if options.secret is None:
        write_secret(home / child.SECRET)
    return child.worker_specs(world_size, options, home, restarts > 0, names, page)


def _size(given: int | None) -> int:
    """The number of workers to start: as given, or else by `gradwire run -n`."""
    if given is not None:
        return given
    asked = workers_from_environment()
    if asked is None:
        raise UsageError(
            "run() was given no world_size, and no launcher has started this process",
            hint="run(fn, world_size=3); or start the program by `python -m gradwire run -n 3 "
            "program.py`, `torchrun --standalone --nproc-per-node 3 program.py` or "
            "`srun -n 3 python program.py`",
        )
    return asked


def _supervise(
    group: ProcessGroup, state: RunState, workers: list[WorkerSpec], line: StartupLine
) -> Verdict:
    """Start the workers, pass their events to the state, and restart those that it names."""
    spec_of = {group.start(spec.name, child.main, spec): spec for spec in workers}
    while (verdict := state.verdict(time.monotonic())) is None:
        for number, news in group.events(state.next_deadline() - time.monotonic()):
            spec = spec_of[number]
            if isinstance(news, str):
                _note(state, spec, news, line)
            elif died := state.exited(spec.rank, news, time.monotonic()):
                spec = workers[spec.rank] = child.restarted(spec)
                how, when = supervise_state.describe_exit(died.status), died.stage.value
                text = "%s died (%s) %s; restarted as incarnation %d"
                _log.warning(text, spec.name, how, when, spec.options.incarnation)
                spec_of[group.start(spec.name, child.main, spec)] = spec
        line.show()
    return verdict


def _note(state: RunState, spec: WorkerSpec, word: str, line: StartupLine) -> None:
    match word:
        case child.BEGUN:
            state.begun(spec.rank)
            line.started(spec.rank)
        case child.JOINED:
            line.joined(spec.rank)
        case child.RETURNED:
            state.returned(time.monotonic())
        case child.LEFT:
            state.left(spec.rank)
        case _:
            assert word == child.FAILED, f"{spec.name} said {word!r}"
            is_lost = _failure_of(spec).type_name == exception_name(PeerLost)
            state.failed(spec.rank, time.monotonic(), of_lost_peer=is_lost)


def check_arguments(
    world_size: int, options: Options, timeout: float | None, restarts: int = 0, who: str = "run"
) -> None:
    """Raise UsageError for invalid arguments of run(), or of another function like it."""
    if type(restarts) is not int or not 0 <= restarts <= LAST_INCARNATION:
        raise UsageError(
            f"{who}(restarts={restarts!r}) is not a number from 0 to {LAST_INCARNATION}"
        )
    if type(world_size) is not int or world_size < 1:
        size = "world_size" if who == "run" else "count"
        raise UsageError(f"{who}() needs at least one worker, not {size}={world_size!r}")
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise UsageError(
            f"run(timeout={timeout!r}) is not a positive, finite number of seconds",
            hint="leave timeout= out for no limit",
        )
    in_place.check_closed(options)
    if options.incarnation:
        raise UsageError(f"{who}() numbers the incarnations itself", hint="leave incarnation= out")
    if options.init_method != Options().init_method:
        raise UsageError(
            f"{who}() makes its own rendezvous, and cannot use {options.init_method}",
            hint="leave init_method out, or start each worker yourself with init_rpc()",
        )


def check_program(fn: Callable[..., object]) -> None:
    """Check that workers can import the program, each in a new process, and are not doing it."""
    # multiprocessing sets this while a spawned process imports the script.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "run() was called while a worker was importing the script",
            hint=supervise_state.MAIN_GUARD_HINT,
        )
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None and getattr(fn, "__module__", None) == "__main__":
        where = "at a prompt, in a notebook or after `python -c`"
    elif path is not None and main.__spec__ is None and not Path(path).exists():
        where = f"in {path}, which is not a file"
    else:
        return
    raise UsageError(
        f"run() was called for a program {where}: its workers cannot import it",
        hint="write it to a file, and run that: python program.py; or start workers that are sent "
        "what is defined here: with gradwire.workers(2) as names",
    )


def _raise(
    verdict: Failed | Died | Overdue, workers: list[WorkerSpec], timeout: float | None
) -> NoReturn:
    names = [spec.name for spec in workers]
    if isinstance(verdict, Overdue):
        raise supervise_state.overdue_error(verdict, names, timeout)
    if isinstance(verdict, Failed):
        raise _revived(workers[verdict.worker])
    reporter = verdict.reported_by
    cause = None if reporter is None else _revived(workers[reporter])
    raise supervise_state.death_error(verdict, names) from cause


def _failure_of(spec: WorkerSpec) -> Failure:
    return msgspec.msgpack.decode(spec.failure.read_bytes(), type=Failure)


def _revived(spec: WorkerSpec) -> GradwireError:
    return revive(_failure_of(spec), sent_exception)
