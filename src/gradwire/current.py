"""How public functions find the worker they belong to; the only state of the process.

Code that a worker runs finds it in a context variable set around it. Other code finds the process's
default, which `init_rpc` sets; a process that hosts many workers has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Generic, TypeVar, final

from gradwire.errors import UsageError

T = TypeVar("T")

_LOADER = (
    "a DataLoader's workers are processes of their own: make the calls in the process that "
    "iterates over it, as with num_workers=0"
)


@final
class Door(Generic[T]):
    """One per layer that has public functions."""

    def __init__(self, name: str) -> None:
        self._here: ContextVar[T] = ContextVar(name)
        self._default: T | None = None
        self._is_forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        self.enter: Callable[[T], Token[T]] = self._here.set
        """from now on this code belongs to that one, until `leave`; hot: each call served"""
        self.leave: Callable[[Token[T]], None] = self._here.reset
        """as it was before"""

    def find(self) -> T:
        """What the calling code belongs to.

        hot: each call
        """
        found = self._here.get(self._default)
        if found is None:
            raise UsageError(
                "no worker is running here: RPC has not been initialized",
                hint=_LOADER
                if _is_data_loader()
                else "call init_rpc() first, or run inside gradwire.run() or testing.cluster()",
            )
        if self._is_forked:
            raise UsageError(
                "this process was forked from a worker, whose threads and connections it lacks",
                hint=_LOADER
                if _is_data_loader()
                else "start processes by spawn, and call init_rpc() in each that is to be a worker",
            )
        return found

    def maybe_find(self) -> T | None:
        """What the calling code belongs to, if there is any in this process."""
        return None if self._is_forked else self._here.get(self._default)

    def maybe_default(self) -> T | None:
        """The default of the process, if it has one."""
        return self._default

    def set_default(self, value: T | None) -> None:
        """What code outside of any worker's scope finds."""
        self._default = value
        self.move_in()

    def move_in(self) -> None:
        """What is found here is of this process, and not of the one that it was forked from."""
        self._is_forked = False

    def _forked(self) -> None:
        self._is_forked = True

    @contextmanager
    def opened(self, value: T) -> Iterator[None]:
        """The block belongs to this one."""
        self.move_in()
        token = self.enter(value)
        try:
            yield
        finally:
            self.leave(token)


def _is_data_loader() -> bool:
    """Whether this is a process that a torch DataLoader has started."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
