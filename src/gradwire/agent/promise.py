"""An outcome that is not there yet: settled once, waited for by any number of threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, final

T = TypeVar("T")

_log = logging.getLogger("gradwire")


@final
class Promise(Generic[T]):
    """Settled once; the first outcome wins.

    Waiting has no deadline of its own: whoever makes a promise sees to it that it is settled in
    time (the agent by its timer), so that the error can say what was waited for.
    """

    __slots__ = ("_callbacks", "_lock", "_outcome", "_waiters", "settled")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.settled = False
        """whether the outcome is there; for others to read"""
        self._outcome: T | None = None
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[T], None]] = []

    def settle(self, outcome: T) -> bool:
        """Give the outcome; False if there was one already. Callbacks run here, on this thread."""
        with self._lock:
            if self.settled:
                return False
            self._outcome, self.settled = outcome, True
            waiters, self._waiters = self._waiters, []
            callbacks, self._callbacks = self._callbacks, []
        for waiter in waiters:
            waiter.release()
        for callback in callbacks:
            try:
                callback(outcome)
            except Exception:  # the others must hear of it all the same
                _log.exception("a callback failed")
        return True

    def wait(self, timeout: float | None = None) -> T:
        """Block until it is settled. A signal (Ctrl-C) interrupts; a timeout raises."""
        if not self.settled:
            waiter = threading.Lock()
            waiter.acquire()
            with self._lock:
                if not self.settled:
                    self._waiters.append(waiter)
                else:
                    waiter.release()
            limit = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            if not waiter.acquire(timeout=limit):
                with self._lock, suppress(ValueError):  # it may have been settled just now
                    self._waiters.remove(waiter)
                raise TimeoutError
        return self._outcome  # type: ignore[return-value]  # settled, so it is a T

    def on_settled(self, callback: Callable[[T], None]) -> None:
        """Call back with the outcome: at once if it is there, else on the thread that settles."""
        with self._lock:
            if not self.settled:
                self._callbacks.append(callback)
                return
        callback(self._outcome)  # type: ignore[arg-type]  # settled, so it is a T
