"""`gradwire.workers`, `start` and `stop`: workers that a notebook, a prompt or a script calls.

crew.py starts and supervises them, definitions.py sends them what the program defines.
"""

from __future__ import annotations

import atexit
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.current import ProcessValue, current_worker
from gradwire.errors import UsageError
from gradwire.launch.crew import Crew
from gradwire.launch.processes import StartMethod
from gradwire.launch.run import check_arguments, given_to_run
from gradwire.options import Options, place_from_environment
from gradwire.rpc.api import Names, shutdown
from gradwire.rpc.expose.registry import listed
from gradwire.rpc.worker import Exposed

_crew: ProcessValue[Crew] = ProcessValue()
"""the workers of this process, until they are stopped"""
_asked: ProcessValue[tuple[object, ...]] = ProcessValue()
"""what `start` was given"""


@contextmanager
def workers(
    count: int,
    *,
    expose: Exposed = (),
    options: Options | None = None,
    restarts: int = 0,
    names: Names | None = None,
    start_method: StartMethod = "forkserver",
) -> Iterator[list[str]]:
    """Start workers w1, w2, … on this machine, join them as w0, and give their names.

    >>> with gradwire.workers(3) as names:
    ...     found = [gradwire.rpc_sync(name, torch.sin, args=(x,)) for name in names]

    In the block this process is a worker, and calls the others. It need be no script: functions and
    classes that a prompt, a notebook or `python -c` defines are sent by value, from here to these
    workers only, as are lambdas, closures, partials and methods of objects, each as it is when it
    is called. That needs `pip install 'gradwire[interactive]'`. `expose` names modules, functions
    and classes that the workers import and run by their names.

    At the end of the block all leave; if it raises, they are ended. None outlives this process. A
    worker that dies is logged, and calls to it raise PeerLost; with `restarts`, it is restarted, as
    by `gradwire.run`. The workers do not import the script, so it needs no guard.
    """
    _begin(count, expose, options, restarts, names, start_method)
    crew = _crew.value
    assert crew is not None
    try:
        yield list(crew.names)
    except BaseException:
        _end(crew, graceful=False)
        raise
    _end(crew, graceful=True)


def start(
    count: int,
    *,
    expose: Exposed = (),
    options: Options | None = None,
    restarts: int = 0,
    names: Names | None = None,
    start_method: StartMethod = "forkserver",
) -> list[str]:
    """Start workers as `workers` does, which stay until `stop`; returns their names.

    For a notebook or a prompt. They stay between cells, and Ctrl-C interrupts the cell alone. If
    this is called again in the same way, the workers that run are kept.

    >>> names = gradwire.start(3)
    >>> y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
    """
    asked = count, listed(expose), options, restarts, names, start_method
    crew = _crew.value
    if crew is not None and crew.is_here:
        if _asked.value != asked:
            raise UsageError(
                f"start() was called before: {', '.join(crew.names)} run",
                hint="call gradwire.stop() first, to start others",
            )
        return list(crew.names)
    _begin(count, expose, options, restarts, names, start_method)
    _asked.value = asked
    assert _crew.value is not None
    return list(_crew.value.names)


def stop() -> None:
    """Leave, and end the workers that `start` has started. Without such workers, do nothing."""
    if _crew.value is not None:
        _end(_crew.value, graceful=True)


def _begin(
    count: int,
    expose: Exposed,
    options: Options | None,
    restarts: int,
    names: Names | None,
    start_method: StartMethod,
) -> None:
    """Start and join them."""
    options = options or Options()
    check_arguments(count, options, None, restarts, "workers")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError("workers were started by a worker that imports the script")
    if place_from_environment() is not None:
        raise UsageError(
            "a launcher has started this process, and it starts the other workers too",
            hint="use gradwire.run() or init_rpc(); with GRADWIRE_LAUNCHER=none it starts its own",
        )
    if _crew.value is not None and not _crew.value.is_here:  # the program has called shutdown()
        _end(_crew.value, graceful=True)
    if current_worker.maybe_default() is not None:
        raise UsageError(
            "this process is a worker already", hint="call gradwire.stop() or shutdown() first"
        )
    exposed = listed(expose)
    given = given_to_run(shutdown, (), exposed)  # there is no function to call
    crew = _crew.value = Crew(count, options, restarts, names, start_method)
    _asked.value = None
    atexit.register(_end_at_exit)
    try:
        crew.start(given, exposed)
    except BaseException:
        _end(crew, graceful=False)
        raise


def _end(crew: Crew, *, graceful: bool) -> None:
    try:
        crew.stop(graceful=graceful)
    finally:
        if _crew.value is crew:
            _crew.value = _asked.value = None
            atexit.unregister(_end_at_exit)


def _end_at_exit() -> None:
    if _crew.value is not None:
        _end(_crew.value, graceful=False)
