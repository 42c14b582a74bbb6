"""`gradwire.run` in a process that a launcher has started: it takes the place that it was given.

All processes call `run`. The lowest rank runs the function, the others serve it, and all leave
together. The launcher starts, restarts and ends the processes, so this file supervises nothing: it
makes each process end with an error if the function failed or its worker was lost.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar, cast

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from gradwire import threads
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, PeerLost, UsageError
from gradwire.launch.supervise_state import CALLER
from gradwire.options import Options
from gradwire.places import LAUNCHER_VARIABLE, Place
from gradwire.rpc.api import Names, default_name, init_rpc, shutdown
from gradwire.rpc.worker import Exposed, Worker
from gradwire.seeing.page import serve_page
from gradwire.seeing.trace import traced_if_asked

T = TypeVar("T")
_log = logging.getLogger("gradwire")

_LOOK_AGAIN_SECONDS = 1.0


class _CallerLost(PeerLost):
    """The worker that runs the function has ended. Its own error, or its death, is the cause."""


def check(
    place: Place, world_size: int | None, timeout: float | None, restarts: int, options: Options
) -> None:
    """Raise UsageError for arguments of run() that contradict the launcher, or are its task."""
    if world_size not in (None, place.world_size):
        raise UsageError(
            f"run() was given world_size={world_size}, but {place.launcher} has started "
            f"{place.world_size} processes",
            hint=f"start as many, or leave world_size out; with {LAUNCHER_VARIABLE}=none run() "
            "starts processes of its own",
        )
    for name, is_given in (("timeout", timeout is not None), ("restarts", bool(restarts))):
        if is_given:
            raise UsageError(
                f"run({name}=…) is for processes that run() starts, and {place.launcher} has "
                "started this one",
                hint="the launcher limits and restarts its processes, as with torchrun "
                "--max-restarts or srun --time",
            )
    check_closed(options)


def check_closed(options: Options) -> None:
    """Raise UsageError for an open world: nobody could tell when the others have left."""
    if options.is_open:
        raise UsageError("run() needs a closed world", hint="leave is_open out, or use init_rpc()")


def run_in_place(
    place: Place,
    fn: Callable[..., T],
    args: tuple[object, ...],
    expose: Exposed,
    options: Options,
    names: Names | None,
    page: bool = False,
) -> T:
    """Call the function on the lowest rank, and return its value there; None on the others."""
    names, me = names or default_name, os.getpid()
    with _ended_with_agent(place):
        try:
            init_rpc(names(place.rank), place.rank, place.world_size, options, expose=expose)
            if place.rank != CALLER:
                _serve(names(CALLER))
                return cast(T, None)
            if page:
                serve_page()
            with traced_if_asked():
                value = fn(*args)
            if current_worker.maybe_default() is not None:  # else the function called shutdown()
                shutdown()
            return value
        except BaseException as error:
            # torchrun shows the error that was recorded first. So it is recorded before the others
            # can notice, and what follows from it is not recorded, nor the error of a process that
            # the function has forked.
            is_cause = isinstance(error, Exception) and not isinstance(error, _CallerLost)
            if is_cause and os.getpid() == me:
                get_error_handler().record_exception(error)
            if current_worker.maybe_default() is not None:
                shutdown(graceful=False)
            raise


def _serve(caller: str) -> None:
    """Serve until the function has returned, and leave."""
    worker = cast(Worker, current_worker.find())
    agent = worker.agent
    while not worker.serve_until_over(CALLER, _LOOK_AGAIN_SECONDS):
        try:  # nothing is done while it is connected
            agent.reach(CALLER, agent.clock.now() + worker.options.timeouts.connect)
        except (PeerLost, DeadlinePassed) as error:
            raise _CallerLost(
                f"{worker.name} served {caller}, which ended before its function returned",
                hint=f"see the output of {caller} for the cause",
            ) from error
    shutdown()


@contextmanager
def _ended_with_agent(place: Place) -> Iterator[None]:
    """End this process if torchrun's agent is killed; other launchers end what they started."""
    is_over = threading.Event()
    if place.launcher == "torchrun":
        watch = partial(_end_with_parent, os.getppid(), is_over)
        threads.thread(name="gradwire parent watch", target=watch).start()
    try:
        yield
    finally:
        is_over.set()


def _end_with_parent(parent: int, is_over: threading.Event) -> None:
    while not is_over.wait(_LOOK_AGAIN_SECONDS):
        if os.getppid() != parent:
            _log.error("the agent of torchrun has ended, so this worker ends")
            threads.flush_output()
            os._exit(1)
