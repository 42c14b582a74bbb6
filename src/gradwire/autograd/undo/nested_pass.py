"""Passes that have ended inside another backward: their outcome depends on that backward.

A Function may run a backward of its own, and that may cross. Its pass ends while the backward
around it goes on, which may still fail; then the changes of the pass on other workers must be
reverted too. So those workers hear how the pass ended only when the backward around it has ended.

That backward is either a run with an undo log, or one of torch's own. In the first case the pass is
kept or reverted with the undo log. In the second a callback is queued in the run: the engine calls
it when the run has succeeded, and drops it when the run has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from gradwire.torch_private import when_run_ends

_WELL_REMEMBERED = 20_000


@final
class Nested:
    """A pass inside another backward. Exactly one of the two callbacks is called, once."""

    __slots__ = ("end_well", "give_up")

    def __init__(self, end_well: Callable[[], None], give_up: Callable[[], bool]) -> None:
        self.end_well, self.give_up = end_well, give_up


@final
class Outcomes:
    """How the passes that began here have ended, for participants that did not hear it."""

    def __init__(self) -> None:
        self._well: dict[int, None] = {}
        self.undecided: dict[int, threading.Event] = {}
        """of the passes that wait for the end of the backward around them"""

    def put_off(self, n: int) -> None:
        """The pass of this number ends as the backward around it does."""
        self.undecided[n] = threading.Event()

    def decide(self, n: int, *, well: bool) -> None:
        """The pass has ended. Only the latest passes that ended well are remembered."""
        if well:
            self._well[n] = None
            if len(self._well) > _WELL_REMEMBERED:
                del self._well[next(iter(self._well))]
        undecided = self.undecided.pop(n, None) if self.undecided else None
        if undecided is not None:
            undecided.set()

    def of(self, n: int, seconds: float) -> bool | None:
        """Whether the pass has ended well; None if that is not decided within the time."""
        undecided = self.undecided.get(n)
        if undecided is not None and not undecided.wait(seconds):
            return None
        return n in self._well


@final
class Inside:
    """A backward of torch's own inside another one, and the passes that have ended in it."""

    def __init__(self) -> None:
        self.nested: list[Nested] = []


@final
class _InsideStack(threading.local):
    def __init__(self) -> None:
        self.stack: list[Inside] = []


_thread = _InsideStack()


def inside_now() -> Inside | None:
    """The innermost backward of that kind in this thread."""
    stack = _thread.stack
    return stack[-1] if stack else None


@contextmanager
def inside() -> Iterator[None]:
    """Around a backward inside another one: the outer one decides the passes that end in it."""
    here = Inside()
    _thread.stack.append(here)
    try:
        yield
    finally:
        _thread.stack.pop()
        for nested in here.nested:
            when_run_ends(_EndOfOuter(nested))


class _EndOfOuter:
    """A callback that the engine calls, or drops, at the end of the backward around a pass."""

    __slots__ = ("_nested", "_was_called")

    def __init__(self, nested: Nested) -> None:
        self._nested, self._was_called = nested, False

    def __call__(self) -> None:
        self._was_called = True
        around = inside_now()
        if around is None:
            self._nested.end_well()
        else:
            around.nested.append(self._nested)

    def __del__(self) -> None:
        if not self._was_called:
            self._nested.give_up()
