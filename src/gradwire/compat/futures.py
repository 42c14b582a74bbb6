"""torch.futures.wait_all and collect_all, for futures that gradwire completes.

Torch's own wait in C++, where a future of ours is done only once all are; they should return as
soon as one has failed.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradwire.compat.rpc import constants
from gradwire.errors import DeadlinePassed
from gradwire.rpc.calls import futures as ours

Futures = list[torch.futures.Future[Any]]


def wait_all(futures: Futures) -> list[Any]:
    """The values of all, or the first exception, without waiting for the others."""
    settled = _Settled(futures)
    settled.wait(futures)
    if settled.failed is not None:
        settled.failed.wait()
    return [future.wait() for future in futures]


def collect_all(futures: Futures) -> torch.futures.Future[Futures]:
    """A future of all of them, done when all are; as soon as one has failed it brings that."""
    collected: torch.futures.Future[Futures] = torch.futures.Future()
    settled = _Settled(futures)

    def complete() -> None:
        error = None if settled.failed is None else _error_of(settled.failed)
        if error is None:
            collected.set_result(futures)
        else:
            collected.set_exception(error)  # type: ignore[arg-type]

    settled.then(complete)
    return collected


class _Settled:
    """When all of some futures are done, or one has failed."""

    def __init__(self, futures: Futures) -> None:
        self.failed: torch.futures.Future[Any] | None = None
        self._lock = threading.RLock()
        self._left = len(futures)
        self._over = threading.Event()
        self._told: Any = None
        for future in futures:
            future.add_done_callback(self._one_done)
        if not futures:
            self._end()

    def wait(self, futures: Futures) -> None:
        """A future of ours has a deadline of its own; one of the program's is given a long time.

        The futures are not kept here: they hold this, through C++, and would never be freed.
        """
        seconds = constants.A_LONG_TIME_SECONDS
        while not self._over.wait(seconds):
            theirs = [future for future in futures if not isinstance(future, ours.Future)]
            late = [future for future in theirs if not future.done()]
            if late:
                raise DeadlinePassed(
                    f"{len(late)} of {len(futures)} futures were not completed in {seconds:g} s",
                    hint="whoever makes a torch.futures.Future() completes it, by set_result or "
                    "set_exception",
                )

    def then(self, told: Any) -> None:  # noqa: ANN401
        """Be told, once."""
        with self._lock:
            self._told = told
            over = self._over.is_set()
        if over:
            self._tell()

    def _one_done(self, future: torch.futures.Future[Any]) -> None:
        failed = _error_of(future) is not None
        with self._lock:
            self._left -= 1
            if failed and self.failed is None:
                self.failed = future
            over = failed or not self._left
        if over:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._over.set()
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            told, self._told = self._told, None
        if told is not None:
            told()


def _error_of(future: torch.futures.Future[Any]) -> Exception | None:
    try:
        future.value()
    except Exception as error:
        return error
    return None
