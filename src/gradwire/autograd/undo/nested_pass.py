"""Passes that have ended inside another backward: their outcome depends on that backward.

A Function may run a backward of its own, and that may cross. Its pass ends while the outer backward
goes on and may still fail; then the changes of the pass on other workers must be reverted too. So
those workers hear how the pass ended only when the outer one has ended: by its undo log, or if it
is one of torch's own by a callback at the end of the run (`EndOfRun`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, final

from gradwire.torch_private import when_run_ends

_log = logging.getLogger("gradwire")
_WELL_REMEMBERED = 20_000


class Nested(NamedTuple):
    """A pass inside another backward. Exactly one of the two callbacks is called, once."""

    end_well: Callable[[], None]
    give_up: Callable[[], bool]


@final
class Outcomes:
    """How the passes that began here have ended, for participants that did not hear it."""

    def __init__(self) -> None:
        self._well: dict[int, None] = {}
        self.undecided: dict[int, threading.Event] = {}
        """of the passes that wait for the end of their outer backward"""

    def defer(self, n: int) -> None:
        """The outer backward decides how the pass of this number ends."""
        self.undecided[n] = threading.Event()

    def decide(self, n: int, *, well: bool) -> None:
        """The pass has ended. Only the latest passes that ended well are remembered."""
        if well:
            self._well[n] = None
            if len(self._well) > _WELL_REMEMBERED:
                del self._well[next(iter(self._well))]
        if self.undecided and (undecided := self.undecided.pop(n, None)) is not None:
            undecided.set()

    def of(self, n: int, seconds: float) -> bool | None:
        """Whether the pass has ended well; None if that is not decided within the time."""
        undecided = self.undecided.get(n)
        if undecided is not None and not undecided.wait(seconds):
            return None
        return n in self._well


@final
class EndOfRun:
    """Calls `succeeded` at the end of the current run, before `backward()` returns, or `failed`.

    If the run fails, the engine drops its callbacks without calling them: the only sign of the
    failure. So `__del__` calls `failed`, which sends and waits, on purpose: the engine drops them
    on the thread of the backward, before that raises. When the user sees the error, the
    participants have reverted the pass.
    """

    __slots__ = ("_failed", "_succeeded", "_was_called")

    def __init__(self, succeeded: Callable[[], None], failed: Callable[[], object]) -> None:
        self._succeeded, self._failed, self._was_called = succeeded, failed, False
        when_run_ends(self)

    def __call__(self) -> None:
        """The run has succeeded."""
        self._was_called = True
        self._succeeded()

    def __del__(self) -> None:
        if self._was_called:
            return
        try:
            self._failed()
        except Exception:  # a finalizer cannot raise
            _log.exception("a failed pass could not be given up")


@final
class _Innermost(threading.local):
    ended: list[Nested] | None = None


_thread = _Innermost()


def inside_now() -> list[Nested] | None:
    """The passes that ended in the innermost nested backward of torch's own; None without one."""
    return _thread.ended


@contextmanager
def inside() -> Iterator[None]:
    """Around a backward inside another one: the outer one decides the passes that end in it."""
    ended: list[Nested] = []
    outer, _thread.ended = _thread.ended, ended
    try:
        yield
    finally:
        _thread.ended = outer
        for nested in ended:
            EndOfRun(partial(_outer_succeeded, nested), nested.give_up)


def _outer_succeeded(nested: Nested) -> None:
    outer = inside_now()
    if outer is None:
        nested.end_well()
    else:
        outer.append(nested)
