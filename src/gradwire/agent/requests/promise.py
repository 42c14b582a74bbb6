"""An outcome that is not there yet: settled once, waited for by any number of threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")

_log = logging.getLogger("gradwire")


@final
class Promise(Generic[T]):
    """Settled once; the first outcome wins.

    Waiting has no deadline of its own: whoever makes a promise sees to it that it is settled in
    time (the agent by its timer), so that the error can say what was waited for.

    Nothing here is locked, as each change is one step for the interpreter. Who takes the token
    settles. Whoever waits or wants to be called adds itself and looks then whether the outcome is
    there; who settles puts it there and looks then who has been added. So one of the two sees the
    other, and a callback is called by the one that takes it out of the list.
    """

    __slots__ = ("_callbacks", "_outcome", "_token", "_waiters", "settled")

    def __init__(self) -> None:
        self._token = [None]
        self.settled = False
        """whether the outcome is there; for others to read"""
        self._outcome: T | None = None
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[T], object]] = []

    def settle(self, outcome: T) -> bool:
        """Give the outcome; False if there was one already. Callbacks run here, on this thread."""
        try:
            self._token.pop()
        except IndexError:
            return False
        self._outcome = outcome
        self.settled = True
        if self._waiters:
            for waiter in tuple(self._waiters):
                waiter.release()
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # who added it has taken it out
                break
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
            self._waiters.append(waiter)
            limit = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            if not self.settled and not waiter.acquire(timeout=limit):
                self._waiters.remove(waiter)
                raise TimeoutError
        return self._outcome  # type: ignore[return-value]  # settled, so it is a T

    def on_settled(self, callback: Callable[[T], object]) -> None:
        """Call back with the outcome: at once if it is there, else on the thread that settles."""
        if not self.settled:
            self._callbacks.append(callback)
            if not self.settled:
                return
            try:
                self._callbacks.remove(callback)
            except ValueError:  # who has settled it calls it
                return
        callback(self._outcome)  # type: ignore[arg-type]  # settled, so it is a T
