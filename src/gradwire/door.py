"""How public functions find the worker they belong to; the only state of the process.

Code that a worker runs finds it in a context variable set around it. Other code finds the process's
default, which `init_rpc` sets; a process that hosts many workers has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar, final

from gradwire.errors import UsageError

T = TypeVar("T")


@final
class Door(Generic[T]):
    """One per layer that has public functions."""

    def __init__(self, name: str) -> None:
        self._here: ContextVar[T] = ContextVar(name)
        self._default: T | None = None

    def find(self) -> T:
        """What the calling code belongs to."""
        found = self._here.get(None) or self._default
        if found is None:
            raise UsageError(
                "no worker is running here: RPC has not been initialized",
                hint="call init_rpc() first, or run inside gradwire.run() or testing.cluster()",
            )
        return found

    def maybe_default(self) -> T | None:
        """The default of the process, if it has one."""
        return self._default

    def set_default(self, value: T | None) -> None:
        """What code outside of any worker's scope finds."""
        self._default = value

    @contextmanager
    def opened(self, value: T) -> Iterator[None]:
        """The block belongs to this one."""
        token = self._here.set(value)
        try:
            yield
        finally:
            self._here.reset(token)
