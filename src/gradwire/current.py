"""What the running code belongs to: its worker, deadline, request, context, and the user's line.

One context variable holds all of it. A worker sets it around each function that it runs. Code
outside of that finds the default of the process, which `init_rpc` sets; a process that hosts many
workers has none. autograd/scope.py enters and leaves contexts.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar, final

import torch

from gradwire.errors import UsageError
from gradwire.threads import FORKED

T = TypeVar("T")

Current = tuple[Any, float, Any, object, Any]
"""The worker (None: the default of the process), the deadline, the inbound request (agent/serving)
or None, the run of an activation checkpoint (rpc/recompute) or None, and the entered context
(autograd/scope.py) or None. A plain tuple: one is made for each call served.
"""

NOWHERE: Current = (None, math.inf, None, None, None)
"""Of code that no worker runs, outside of any context."""
_current: ContextVar[Current] = ContextVar("gradwire", default=NOWHERE)

# hot: each call, so these are not Python functions
get_current: Callable[[], Current] = _current.get
set_current: Callable[[Current], Token[Current]] = _current.set
reset_current: Callable[[Token[Current]], None] = _current.reset


def current_inbound() -> Any:  # noqa: ANN401  # this layer does not know the type
    """The inbound request that this code serves, or None."""
    return _current.get()[2]


def swap_checkpoint_run(run: object) -> object:
    """Set the checkpoint run that this code is a part of; returns the one before."""
    worker, deadline, inbound, before, context = _current.get()
    _current.set((worker, deadline, inbound, run, context))
    return before


@final
class CurrentWorker:
    """The worker that the calling code belongs to."""

    def __init__(self) -> None:
        self._default: Any = None
        self.is_forked = False
        """until a worker is made in this process, what is found here is its parent's"""
        os.register_at_fork(after_in_child=self._forked)

    def find(self) -> Any:  # noqa: ANN401
        """The worker; UsageError if there is none. hot: each call"""
        found = _current.get()[0]
        if found is None:
            found = self._default
        if found is None:
            why = "no worker is running here: RPC has not been initialized"
            hint = "call init_rpc() first, or run inside gradwire.run() or testing.cluster()"
        elif self.is_forked:
            why = FORKED
            hint = "start processes by spawn, and call init_rpc() in each that is to be a worker"
        else:
            return found
        data = sys.modules.get("torch.utils.data")
        if data is not None and data.get_worker_info() is not None:
            hint = (
                "a DataLoader's workers are processes of their own: make the calls in the process "
                "that iterates over it, as with num_workers=0"
            )
        raise UsageError(why, hint=hint)

    def maybe_find(self) -> Any:  # noqa: ANN401
        """The worker, or None if this process has none."""
        if self.is_forked:
            return None
        found = _current.get()[0]
        return self._default if found is None else found

    def maybe_default(self) -> Any:  # noqa: ANN401
        """The default of the process, or None."""
        return self._default

    def set_default(self, worker: object) -> None:
        """Set what code outside of any worker's scope finds."""
        self._default = worker
        self.is_forked = False

    def _forked(self) -> None:
        self.is_forked = True

    @contextmanager
    def use(self, worker: object) -> Iterator[None]:
        """Code in the block belongs to this worker."""
        self.is_forked = False
        _, *rest = _current.get()
        token = _current.set((worker, *rest))
        try:
            yield
        finally:
            _current.reset(token)


current_worker = CurrentWorker()


@final
class ProcessValue(Generic[T]):
    """A value that a process has once, whatever its workers; None until it is set."""

    value: T | None = None


# -- the line of the user's program that has called into gradwire

# Each ends with a separator: a program in a folder gradwire_app is the user's.
_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


def user_level(frame: FrameType) -> int:
    """How many frames above this one the user's code is.

    Torch's frames are skipped too: Python shows a warning once for each line, so all modules of a
    program would share the one at the line in `Module.__call__`.
    """
    level, above = 0, frame
    while above.f_back is not None and above.f_code.co_filename.startswith(_LIBRARIES):
        above, level = above.f_back, level + 1
    return level


UserLine = tuple[CodeType, int]
"""A place in the user's code: to find its line takes longer, and few are ever asked for."""
_library_files: set[str] = set()
"""those found so far: looking a name up is faster than comparing its beginning"""


def user_line(above: int = 1) -> UserLine | None:
    """Where the user's code runs now, if any does. hot: each message with a graph

    So many callers of this function are known to be gradwire's.
    """
    frame: FrameType | None = sys._getframe(above)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if name not in _library_files:
            if not name.startswith(_LIBRARIES):
                return None if name == threading.__file__ else (code, frame.f_lasti)
            _library_files.add(name)
        frame = frame.f_back
    return None


def spoken_line(place: UserLine | None) -> str:
    """The file and line of a place, or ''."""
    if place is None:
        return ""
    code, at = place
    lines = (line for start, end, line in code.co_lines() if start <= at < end)
    return f"{code.co_filename}:{next(lines, None) or code.co_firstlineno}"
