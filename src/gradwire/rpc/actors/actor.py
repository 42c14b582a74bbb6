"""actor() and Actor: an object on another worker whose methods run one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from gradwire.errors import BadMessage, UsageError
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.rref import MethodProxy, RRef

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

T = TypeVar("T")
MOST_CONCURRENCY: Final = 1 << 16


def check_concurrency(most: object) -> None:
    """UsageError unless it is a number of methods."""
    if type(most) is not int or not 1 <= most <= MOST_CONCURRENCY:
        raise UsageError(
            f"an actor was asked for with max_concurrency={most!r:.40}",
            hint=f"it is how many of its methods may run at a time, from 1 to {MOST_CONCURRENCY}",
        )


class Actor(Generic[T]):
    """A handle on an object of another worker; `actor` makes one.

    `handle.method(…)` returns a future at once; `handle.rpc_sync().method(…)` waits for the result.
    Methods begin in the order in which calls arrive, those of one thread in the order it made them,
    and one at a time. The object lives as long as any worker has a handle. Calls may pass it.
    """

    __slots__ = ("__weakref__", "_most", "_rref")

    def __init__(self, rref: RRef[T], max_concurrency: int = 1) -> None:
        check_concurrency(max_concurrency)
        self._rref, self._most = rref, max_concurrency

    def rpc_sync(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`handle.rpc_sync().method(…)` returns what the method returns."""
        calls = self._rref._home.calls
        return MethodProxy(self._rref, calls.call, timeout, _waits=True, _most=self._most)

    def rpc_async(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`handle.rpc_async().method(…)` returns a future, as `handle.method(…)` does."""
        calls = self._rref._home.calls
        return MethodProxy(self._rref, calls.call_async, timeout, _most=self._most)

    def owner_name(self) -> str:
        """The name of the worker the object lives on."""
        return self._rref.owner_name()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # Python asks for many of its own
            raise AttributeError(name)
        method: Callable[..., Any] = getattr(self.rpc_async(), name)
        return method

    def __repr__(self) -> str:
        return f"Actor({self._rref!r})"

    def __reduce__(self) -> NoReturn:
        self._rref.__reduce__()

    def _pack(self) -> list[int]:
        """Add it to the message being packed. Called by the codec."""
        return [self._rref._pack(), self._most]


def unpacked_actor(worker: Worker, data: object) -> Actor[Any]:
    """The actor in a message being unpacked. Called by the codec."""
    match data:
        case [int() as index, int() as most] if 1 <= most <= MOST_CONCURRENCY:
            rref = worker.refs.unpacked(index)
        case _:
            raise BadMessage("an actor in a message is not a reference and a number")
    return Actor(rref, most)  # type: ignore[arg-type]
