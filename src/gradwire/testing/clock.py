"""A clock that moves when told."""

from __future__ import annotations

import threading
import time
from typing import final


@final
class ManualClock:
    """Give it to `cluster(…, clock=…)`: deadlines pass when the test says so, and only then.

    It starts at the machine's own time, so that its deadlines mean something to a transport.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = time.monotonic()
        self._sleepers: list[threading.Condition] = []

    def now(self) -> float:
        """The time, as far as it was moved."""
        return self._now

    def sleep(self, wake: threading.Condition, until: float | None) -> None:
        """Wait on `wake` until it is notified or the clock is moved."""
        with self._lock:
            self._sleepers.append(wake)
        try:
            if until is None or self._now < until:
                wake.wait()
        finally:
            with self._lock:
                self._sleepers.remove(wake)

    def advance(self, seconds: float) -> None:
        """Move it, and wake the threads that sleep by it."""
        with self._lock:
            self._now += seconds
            sleepers = list(self._sleepers)
        for wake in sleepers:
            with wake:
                wake.notify_all()
