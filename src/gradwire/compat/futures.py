"""torch.futures.wait_all and collect_all, for futures that gradwire completes.

Torch's own wait in C++, where a future of ours is done only once all are; they should return as
soon as one has failed.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

Futures = list[torch.futures.Future[Any]]


def wait_all(futures: Futures) -> list[Any]:
    """The values of all, or the first exception, without waiting for the others."""
    settled = _Settled(futures)
    settled.wait()
    if settled.failed is not None:
        settled.failed.wait()
    return [future.wait() for future in futures]


def collect_all(futures: Futures) -> torch.futures.Future[Futures]:
    """A future of all of them, done when all are, or as soon as one has failed."""
    collected: torch.futures.Future[Futures] = torch.futures.Future()
    settled = _Settled(futures)
    settled.then(lambda: collected.set_result(futures))
    return collected


class _Settled:
    """When all of some futures are done, or one has failed."""

    def __init__(self, futures: Futures) -> None:
        self.failed: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._left = len(futures)
        self._over = threading.Event()
        self._told: Any = None
        for future in futures:
            future.add_done_callback(self._one_done)
        if not futures:
            self._end()

    def wait(self) -> None:
        """Each future has a deadline of its own."""
        self._over.wait()

    def then(self, told: Any) -> None:  # noqa: ANN401
        """Be told, once."""
        with self._lock:
            self._told = told
            over = self._over.is_set()
        if over:
            self._tell()

    def _one_done(self, future: torch.futures.Future[Any]) -> None:
        failed = _has_failed(future)
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


def _has_failed(future: torch.futures.Future[Any]) -> bool:
    try:
        future.value()
    except Exception:
        return True
    return False
