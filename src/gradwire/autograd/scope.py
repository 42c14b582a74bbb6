"""Which context this code runs in.

A context variable: served functions, engine runs and callbacks get it set around them. Threads
start empty; `contextvars.copy_context().run` carries it into one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from gradwire.autograd.graph import make_room
from gradwire.ids import ContextId

_current: ContextVar[ContextId | None] = ContextVar("gradwire context", default=None)


def current_context() -> ContextId | None:
    """The context of the running code, if it is in one."""
    return _current.get()


@contextmanager
def inside(context: ContextId | None) -> Iterator[None]:
    """Run the block in this context.

    Engine runs inside a context use the calling thread only: with a queue per device, a Send that
    waits on the CPU's thread can hide work that a node on another device is about to make ready
    there.
    """
    token = _current.set(context)
    try:
        if context is None:
            yield
        else:
            make_room()  # See Note [The order of waiting], graph.py
            with torch.autograd.set_multithreading_enabled(False):
                yield
    finally:
        _current.reset(token)
