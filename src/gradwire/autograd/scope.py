"""Which context this code runs in.

A context variable: served functions, engine runs and callbacks get it set around them. Threads
start empty; `contextvars.copy_context().run` carries it into one.

Engine runs inside a context use the calling thread only: with a queue per device, a Send that waits
on the CPU's thread can hide work that a node on another device is about to make ready there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token
from typing import NamedTuple

import torch

from gradwire.autograd.graph import make_room
from gradwire.ids import ContextId

Saving = Callable[[], AbstractContextManager[object]]
"""What to enter around code that makes graphs: how these keep the tensors they need."""


class _Stay(NamedTuple):
    context: ContextId
    saving: Saving | None
    around: ExitStack
    """what ends with it"""


_current: ContextVar[_Stay | None] = ContextVar("gradwire context", default=None)


def current_context() -> ContextId | None:
    """The context of the running code, if it is in one."""
    stay = _current.get()
    return None if stay is None else stay.context


def enter(context: ContextId, saving: Saving | None = None) -> None:
    """From now on this code runs in a context, until it leaves it."""
    make_room()  # See Note [The order of waiting], graph.py
    around = ExitStack()
    around.enter_context(torch.autograd.set_multithreading_enabled(False))
    if saving is not None:
        around.enter_context(saving())
    _current.set(_Stay(context, saving, around))


def leave(context: ContextId) -> None:
    """This code runs in that context no more, if it did."""
    stay = _current.get()
    if stay is not None and stay.context == context:
        stay.around.close()
        _current.set(None)


def leave_outer() -> Token[_Stay | None]:
    """For now this code is in no context, until `back_to_outer`."""
    return _current.set(None)


def back_to_outer(token: Token[_Stay | None]) -> None:
    """As it was before."""
    _current.reset(token)


@contextmanager
def inside(context: ContextId | None, saving: Saving | None = None) -> Iterator[None]:
    """Run the block in this context, or in none.

    Graphs keep tensors as said, or else as in the code around the block.
    """
    outer = _current.get()
    if saving is None and outer is not None:
        saving = outer.saving
    token = _current.set(None)
    if context is not None:
        enter(context, saving)
    try:
        yield
    finally:
        if context is not None:
            leave(context)
        _current.reset(token)
