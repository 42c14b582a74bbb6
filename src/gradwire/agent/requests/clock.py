"""The time, and how to sleep until a moment of it. Tests bring a clock that moves when told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, final


class Clock(Protocol):
    """What a worker asks of time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def sleep(self, wake: threading.Condition, until: float | None) -> None:
        """Wait on `wake` (held by the caller) until it is notified or the moment has come."""


@final
class MonotonicClock:
    """The machine's own."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        """seconds since some fixed moment; no function of ours around it, as all ask often"""

    def sleep(self, wake: threading.Condition, until: float | None) -> None:
        """See Clock."""
        if until is None:
            wake.wait()
        else:
            wake.wait(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
