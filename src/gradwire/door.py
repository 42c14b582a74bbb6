"""How public functions find the worker they belong to; the only state of the process.

Code that a worker runs finds it in a context variable set around it. Other code finds the process's
default, which `init_rpc` sets; a process that hosts many workers has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Generic, TypeVar, final

from gradwire.errors import UsageError

T = TypeVar("T")


@final
class Door(Generic[T]):
    """One per layer that has public functions."""

    def __init__(self, name: str) -> None:
        self._here: ContextVar[T] = ContextVar(name)
        self._default: T | None = None
        self._process = os.getpid()

    def find(self) -> T:
        """What the calling code belongs to."""
        found = self._here.get(None) or self._default
        if found is None:
            raise UsageError(
                "no worker is running here: RPC has not been initialized",
                hint="call init_rpc() first, or run inside gradwire.run() or testing.cluster()",
            )
        if os.getpid() != self._process:
            raise UsageError(
                "this process was forked from a worker, whose threads and connections it lacks",
                hint="start processes by spawn, and call init_rpc() in each that is to be a worker",
            )
        return found

    def maybe_default(self) -> T | None:
        """The default of the process, if it has one."""
        return self._default

    def set_default(self, value: T | None) -> None:
        """What code outside of any worker's scope finds."""
        self._default = value
        self._process = os.getpid()

    def enter(self, value: T) -> Token[T]:
        """From now on this code belongs to that one, until `leave`."""
        self._process = os.getpid()
        return self._here.set(value)

    def leave(self, token: Token[T]) -> None:
        """As it was before."""
        self._here.reset(token)

    @contextmanager
    def opened(self, value: T) -> Iterator[None]:
        """The block belongs to this one."""
        token = self.enter(value)
        try:
            yield
        finally:
            self.leave(token)
