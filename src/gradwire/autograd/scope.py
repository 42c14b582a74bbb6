"""Which context this code runs in.

A context variable: served functions, engine runs and callbacks get it set around them. Threads
start empty; `contextvars.copy_context().run` carries it into one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import partial
from typing import final

import msgspec

from gradwire.autograd.graph.walk import ROOM, lift_this_thread
from gradwire.ids import ContextId

Saving = Callable[[], AbstractContextManager[object]]
"""What to enter around code that makes graphs: how these keep the tensors they need."""


class _Stay(msgspec.Struct, frozen=True):
    context: ContextId
    saving: Saving | None
    kept: AbstractContextManager[object] | None
    """what was made of `saving`, and ends with the stay"""


_current: ContextVar[_Stay | None] = ContextVar("gradwire context", default=None)


def current_context() -> ContextId | None:
    """The context of the running code, if it is in one."""
    stay = _current.get()
    return None if stay is None else stay.context


def enter(context: ContextId, saving: Saving | None = None) -> None:
    """From now on this code runs in a context, until it leaves it."""
    lift_this_thread(ROOM)  # See Note [The order of waiting], graph/walk.py
    kept = None if saving is None else saving()
    if kept is not None:
        kept.__enter__()
    _current.set(_Stay(context, saving, kept))


def leave(context: ContextId) -> None:
    """This code runs in that context no more, if it did."""
    stay = _current.get()
    if stay is not None and stay.context == context:
        _current.set(None)
        if stay.kept is not None:
            stay.kept.__exit__(None, None, None)


leave_outer: Callable[[], Token[_Stay | None]] = partial(_current.set, None)
"""for now this code is in no context, until `back_to_outer`; hot: each call served"""
back_to_outer: Callable[[Token[_Stay | None]], None] = _current.reset
"""as it was before"""


@final
class inside:
    """Run the block in this context, or in none.

    Graphs keep tensors as said, or else as in the code around the block.
    """

    __slots__ = ("_context", "_outer", "_saving")

    def __init__(self, context: ContextId | None, saving: Saving | None = None) -> None:
        self._context, self._saving = context, saving

    def __enter__(self) -> None:
        context, saving, outer = self._context, self._saving, _current.get()
        self._outer: Token[_Stay | None] | None = None
        if outer is not None:
            saving = outer.saving if saving is None else saving
            if outer.context == context and outer.saving == saving:
                return
        self._outer = _current.set(None)
        if context is not None:
            enter(context, saving)

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            if self._context is not None:
                leave(self._context)
            _current.reset(self._outer)
