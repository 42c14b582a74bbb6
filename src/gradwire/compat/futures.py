"""torch.futures.wait_all and collect_all, which return as soon as one of gradwire's has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from gradwire.errors import DeadlinePassed
from gradwire.options import FOREVER
from gradwire.rpc.calls import futures as ours

Futures = list[torch.futures.Future[Any]]
Act = Callable[[torch.futures.Future[Any] | None], None]


def wait_all(futures: Futures) -> list[Any]:
    """The values of all, or the first exception, without waiting for the others."""
    settled: SimpleQueue[torch.futures.Future[Any] | None] = SimpleQueue()
    _when_settled(futures, settled.put)
    while True:
        try:
            failed = settled.get(timeout=FOREVER)  # for the program's own; ours have deadlines
            break
        except Empty:
            theirs = [future for future in futures if not isinstance(future, ours.Future)]
            late = [future for future in theirs if not future.done()]
        if late:
            raise DeadlinePassed(
                f"{len(late)} of {len(futures)} futures were not completed in {FOREVER:g} s",
                hint="whoever makes a torch.futures.Future() completes it, by set_result or "
                "set_exception",
            )
    if failed is not None:
        failed.wait()
    return [future.wait() for future in futures]


def collect_all(futures: Futures) -> torch.futures.Future[Futures]:
    """A future of all of them, done when all are; as soon as one has failed it has that error."""
    collected: torch.futures.Future[Futures] = torch.futures.Future()

    def complete(failed: torch.futures.Future[Any] | None) -> None:
        if failed is None:
            collected.set_result(futures)
        else:
            collected.set_exception(_error_of(failed))  # type: ignore[arg-type]

    _when_settled(futures, complete)
    return collected


def _when_settled(futures: Futures, act: Act) -> None:
    """Call `act` once: with the first future that fails, or with None when all are done."""
    lock, left = threading.RLock(), len(futures)
    # Each future holds `one_done` through C++ until it is done, which may be never. So that this is
    # no cycle that nobody frees, `one_done` holds no future, and what `act` holds until it is due.
    acts = [act]

    def one_done(future: torch.futures.Future[Any]) -> None:
        nonlocal left
        failed = _error_of(future) is not None
        with lock:
            left -= 1
            due = [acts.pop()] if acts and (failed or not left) else []
        for act in due:
            act(future if failed else None)

    for future in futures:
        future.add_done_callback(one_done)
    if not futures:
        act(None)


def _error_of(future: torch.futures.Future[Any]) -> Exception | None:
    try:
        future.value()
    except Exception as error:
        return error
    return None
