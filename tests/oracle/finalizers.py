"""Objects whose finalizer makes a call, and which only the garbage collector ends.

The collector runs them at any allocation of any thread, in the middle of anything.
"""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from gradwire.errors import UsageError
from gradwire.threads import MAKE_IT_ELSEWHERE
from tests.oracle.state import State

_SECONDS = 20.0


class Finalizer:
    """Calls `say` when it is collected, with the context variables of where it was made.

    If it interrupts its thread where that may not wait, it is refused, and does what the error
    says: it leaves a note, and `settle` makes the call.
    """

    def __init__(self, state: State, say: Callable[[], None]) -> None:
        self.itself = self
        self.state, self.say = state, say
        self.context = contextvars.copy_context()
        state.owe(1)

    def __del__(self) -> None:
        _say(self.state, partial(self.context.run, self.say))


def _say(state: State, say: Callable[[], None]) -> None:
    try:
        say()
    except UsageError as error:
        if MAKE_IT_ELSEWHERE in str(error):
            state.later.append(say)
            return
        state.count(f"finalizer raised {type(error).__name__}: {error}")
    except BaseException as error:
        state.count(f"finalizer raised {type(error).__name__}: {error}")
    state.owe(-1)


def settle(state: State) -> None:
    """Run what was not collected yet, and wait for what runs on other threads."""
    if not state.owed:
        return
    pause = threading.Event()
    for _ in range(int(_SECONDS / 0.01)):
        gc.collect()  # does nothing while another thread collects
        while state.later:
            _say(state, state.later.popleft())
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
