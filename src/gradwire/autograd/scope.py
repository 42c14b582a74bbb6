"""Which context this code runs in.

A context variable: served functions, engine runs and callbacks get it set around them. Threads
start empty; `contextvars.copy_context().run` carries it into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from gradwire.autograd.graph import make_room
from gradwire.ids import ContextId

_current: ContextVar[ContextId | None] = ContextVar("gradwire context", default=None)

Saving = Callable[[], AbstractContextManager[object]]
"""What to enter around code that makes graphs: how these keep the tensors they need."""
_saving: ContextVar[Saving | None] = ContextVar("gradwire saving", default=None)


def current_context() -> ContextId | None:
    """The context of the running code, if it is in one."""
    return _current.get()


@contextmanager
def inside(context: ContextId | None, saving: Saving | None = None) -> Iterator[None]:
    """Run the block in this context, saving tensors as said, or else as the code around it does.

    Engine runs inside a context use the calling thread only: with a queue per device, a Send that
    waits on the CPU's thread can hide work that a node on another device is about to make ready
    there.
    """
    saving = saving or _saving.get()
    token, outer = _current.set(context), _saving.set(saving)
    try:
        if context is None:
            yield
        else:
            make_room()  # See Note [The order of waiting], graph.py
            how = nullcontext() if saving is None else saving()
            with torch.autograd.set_multithreading_enabled(False), how:
                yield
    finally:
        _saving.reset(outer)
        _current.reset(token)
