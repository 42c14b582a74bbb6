"""Which context this code runs in.

The context is the last entry of the current slot (current.py): served functions, engine runs and
callbacks get it set around them. Threads start empty; `contextvars.copy_context().run` carries it
into one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Token
from typing import final

from gradwire.autograd.graph.walk import ROOM, lift_this_thread
from gradwire.current import Current, current_worker, get_current, reset_current, set_current
from gradwire.ids import ContextId
from gradwire.torch_private import NOTHING

Saving = Callable[[], AbstractContextManager[object]]
"""What to enter around code that makes graphs: how these keep the tensors they need."""


_Stay = tuple[ContextId, AbstractContextManager[object] | None]
"""An entered context, and what was made of `Saving` for it; both end together."""


def current_context() -> ContextId | None:
    """The context of the running code, if it is in one."""
    stay: _Stay | None = get_current()[4]
    return None if stay is None else stay[0]


def stay_in(context: ContextId, saving: Saving | None) -> _Stay:
    """Prepare this thread for a context: what to make the last entry of the current slot."""
    lift_this_thread(ROOM)  # See Note [The order of waiting], graph/walk.py
    kept = None if saving is None else saving()
    if kept is not None:
        kept.__enter__()
    return context, kept


def enter(context: ContextId, saving: Saving | None = None) -> None:
    """From now on this code runs in a context, until it leaves it."""
    worker, deadline, inbound, run, _ = get_current()
    set_current((worker, deadline, inbound, run, stay_in(context, saving)))


def leave(context: ContextId) -> None:
    """This code runs in that context no more, if it did."""
    worker, deadline, inbound, run, stay = get_current()
    if stay is not None and stay[0] == context:
        set_current((worker, deadline, inbound, run, None))
        if stay[1] is not None:
            stay[1].__exit__(None, None, None)


@final
class inside:
    """Run the block in this context, or in none."""

    __slots__ = ("_context", "_outer")

    def __init__(self, context: ContextId | None) -> None:
        self._context = context
        self._outer: Token[Current] | None = None

    def __enter__(self) -> None:
        if current_context() == self._context:
            return
        worker, deadline, inbound, run, _ = get_current()
        self._outer = set_current((worker, deadline, inbound, run, None))
        if self._context is not None:
            enter(self._context)

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            reset_current(self._outer)


def saving_here() -> AbstractContextManager[object]:
    """A block in which graphs keep tensors as those of this worker do, whatever is around it."""
    worker = current_worker.maybe_find()
    if worker is None or worker.engine.saving is None:
        return NOTHING
    if worker.engine.only_in_contexts and current_context() is None:
        return NOTHING
    kept: AbstractContextManager[object] = worker.engine.saving()
    return kept
