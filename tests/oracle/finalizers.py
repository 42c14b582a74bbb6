"""Objects whose finalizer makes a call, and which only the garbage collector ends.

The collector runs them at any allocation of any thread, in the middle of anything.
"""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.oracle.state import State

_SECONDS = 20.0


class Finalizer:
    """Calls `say` when it is collected, with the context variables of where it was made."""

    def __init__(self, state: State, say: Callable[[], None]) -> None:
        self.itself = self
        self.state, self.say = state, say
        self.context = contextvars.copy_context()
        state.owe(1)

    def __del__(self) -> None:
        try:
            self.context.run(self.say)
        except BaseException as error:
            self.state.count(f"finalizer raised {type(error).__name__}: {error}")
        finally:
            self.state.owe(-1)


def settle(state: State) -> None:
    """Run what was not collected yet, and wait for what runs on other threads."""
    if not state.owed:
        return
    pause = threading.Event()
    for _ in range(int(_SECONDS / 0.01)):
        gc.collect()  # does nothing while another thread collects
        if not state.owed:
            return
        pause.wait(0.01)
    state.count(f"finalizers that never ended: {state.owed}")


@contextmanager
def not_collecting() -> Iterator[None]:
    """Only where it is asked for."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collecting(thresholds: tuple[int, int, int] | None) -> Iterator[None]:
    """The collector runs so often inside."""
    before = gc.get_threshold()
    if thresholds is not None:
        gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)
