"""An outcome that will be there later: settled once, waited for by any number of threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")

_log = logging.getLogger("gradwire")


@final
class Promise(Generic[T]):
    """A value that is set once; the first `settle` wins.

    Waiting has no deadline of its own: the maker of a promise settles it in time (the agent by its
    timer), so that the error can say what was waited for.

    There is no lock, see Note [One step of the interpreter]: a finalizer may interrupt a thread
    here, and settle or wait on the same thread. The thread that pops the token settles. A waiter
    adds itself, then checks `settled`; the settling thread sets `settled`, then looks at the list.
    So at least one of the two sees the other. If both see a callback, the one that removes it from
    the list calls it.
    """

    __slots__ = ("_callbacks", "_outcome", "_token", "_waiters", "settled")

    def __init__(self) -> None:
        self._token = [None]
        self.settled = False
        """whether the outcome is there; read-only for others"""
        self._outcome: T | None = None
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[T], object]] = []

    def settle(self, outcome: T) -> bool:
        """Set the outcome; False if there was one already. Callbacks run on this thread."""
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
            except IndexError:  # on_settled() has removed it, and calls it
                break
            try:
                callback(outcome)
            except Exception:  # the other callbacks must still run
                _log.exception("a callback failed")
        return True

    def wait(self, timeout: float | None = None) -> T:
        """Block until it is settled. A signal (Ctrl-C) interrupts; TimeoutError after `timeout`."""
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
        """Call `callback` with the outcome: now if it is there, else on the thread that settles."""
        if not self.settled:
            self._callbacks.append(callback)
            if not self.settled:
                return
            try:
                self._callbacks.remove(callback)
            except ValueError:  # settle() has removed it, and calls it
                return
        callback(self._outcome)  # type: ignore[arg-type]  # settled, so it is a T
