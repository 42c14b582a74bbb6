"""Which context this code runs in, and the scope of a function that a peer has called.

The context is the last entry of the current slot (current.py): served functions, engine runs and
callbacks get it set around them. Threads start empty; `contextvars.copy_context().run` carries it
into one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from gradwire.autograd.graph.walk import ROOM, lift_this_thread
from gradwire.current import current_worker, get_current, reset_current, set_current
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


def enter(context: ContextId, saving: Saving | None = None) -> None:
    """From now on this code runs in a context, until it leaves it."""
    lift_this_thread(ROOM)  # See Note [The order of waiting], graph/walk.py
    kept = None if saving is None else saving()
    if kept is not None:
        kept.__enter__()
    worker, deadline, inbound, run, _ = get_current()
    set_current((worker, deadline, inbound, run, (context, kept)))


def leave(context: ContextId) -> None:
    """This code runs in that context no more, if it did."""
    worker, deadline, inbound, run, stay = get_current()
    if stay is not None and stay[0] == context:
        set_current((worker, deadline, inbound, run, None))
        if stay[1] is not None:
            stay[1].__exit__(None, None, None)


@contextmanager
def inside(context: ContextId | None) -> Iterator[None]:
    """Run the block in this context, or in none."""
    worker, deadline, inbound, run, _ = get_current()
    if current_context() == context:
        yield
        return
    outer = set_current((worker, deadline, inbound, run, None))
    if context is not None:
        enter(context)
    try:
        yield
    finally:
        reset_current(outer)


def saving_here() -> AbstractContextManager[object]:
    """A block in which graphs keep tensors as those of this worker do, whatever is around it."""
    worker = current_worker.maybe_find()
    if worker is None or worker.engine.saving is None:
        return NOTHING
    if worker.engine.only_in_contexts and current_context() is None:
        return NOTHING
    kept: AbstractContextManager[object] = worker.engine.saving()
    return kept


@final
class CallScope:
    """The scope of a served function: its worker, its context, its deadline, its request.

    The constructor enters it; `leave` or the end of a `with` block leaves it. An outer deadline
    that is earlier stays. Without a request, the one around it stays. Graphs that it makes keep
    their tensors as the engine says, in a context or not, if graphs cross workers there.

    hot: each call served, so it is not made of nested `with` blocks
    """

    __slots__ = ("_context", "_drawing", "_kept", "_outer")

    def __init__(
        self,
        worker: Any,  # noqa: ANN401  # this layer does not know the type
        context: ContextId | None,
        deadline: float = math.inf,
        inbound: object = None,
        *,
        makes_graphs: bool = True,
    ) -> None:
        self._drawing: AbstractContextManager[object] | None = None
        if worker.own is not None:  # it draws from its own random generator
            self._drawing = worker.own.drawing()
            self._drawing.__enter__()
        _, outer_deadline, outer_inbound, run, _ = get_current()
        if outer_deadline < deadline:
            deadline = outer_deadline
        if inbound is None:
            self._outer = set_current((worker, deadline, outer_inbound, run, None))
        else:
            self._outer = set_current((worker, deadline, inbound, None, None))
        self._context = context
        self._kept: AbstractContextManager[object] | None = None
        engine = worker.engine
        if context is not None:
            enter(context, engine.saving)
        elif engine.saving is not None and makes_graphs and not engine.only_in_contexts:
            self._kept = engine.saving()
            self._kept.__enter__()

    def leave(self) -> None:
        """Restore what was current before."""
        if self._kept is not None:
            self._kept.__exit__(None, None, None)
        if self._context is not None:
            leave(self._context)
        reset_current(self._outer)
        if self._drawing is not None:
            self._drawing.__exit__(None, None, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.leave()
