"""A function on a thread of its own, and what became of it; for checks that may not hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from gradwire.errors import GradwireError

PATIENCE = 10.0  # seconds until something that should have happened counts as never happening
_MOMENT = 0.01

T = TypeVar("T")
E = TypeVar("E", bound=GradwireError)


class Background(Generic[T]):
    """A function on a thread of its own, and what became of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:
            self._future.set_exception(error)

    def is_blocked(self) -> bool:
        """Whether it is still at it after a moment; one that must block always is."""
        self._thread.join(2 * _MOMENT)
        return self._thread.is_alive()

    def result(self) -> T:
        """What it returned, or raise what it raised."""
        self._thread.join(PATIENCE)
        expect(not self._thread.is_alive(), f"still blocked after {PATIENCE:g} s")
        return self._future.result(0)

    def error(self, kind: type[E]) -> E:
        """What it raised."""
        return raised(kind, self.result)


def raised(kind: type[E], function: Callable[[], object]) -> E:
    """The error that the function raises, which must be of this kind."""
    try:
        outcome = function()
    except kind as error:
        return error
    raise AssertionError(f"{outcome!r:.200} instead of {kind.__name__}")


def expect(condition: bool, otherwise: str) -> None:
    """Fail with these words unless it is so."""
    # Not `assert`, which `python -O` leaves out: these are the whole point of the file.
    if not condition:
        raise AssertionError(otherwise)
