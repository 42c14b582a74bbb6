"""RRef: a value that lives on one worker, in the hands of others.

How many hold it is counted in refs/state.py; this file is what the user sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import torch

from gradwire.agent.peers.directory import Directory, WorkerInfo
from gradwire.autograd.api import backward
from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.ids import ContextId
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.calls.client import Calls, Target
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.calls.server import checked_tensor
from gradwire.rpc.refs.contents import Value
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.refs import Refs

T = TypeVar("T")


class Home(Protocol):
    """What a reference asks of the worker it belongs to."""

    refs: Refs
    calls: Calls
    directory: Directory

    def deadline(self, timeout: Timeout) -> float:
        """The moment a wait that begins now must end."""

    def backward_deadline(self, timeout: Timeout = DEFAULT) -> float:
        """The moment a backward pass that begins now is given up."""


class RRef(Generic[T]):
    """A reference to a value on its owner; `RRef(value)` makes one to a value of this worker.

    The value lives as long as any worker holds a reference to it. References travel in calls.
    """

    __slots__ = ("__weakref__", "_home", "hold")

    def __init__(self, value: T) -> None:
        home: Home = current_worker.find()
        self._bind(home, home.refs.keep_here(Value(value)))

    @classmethod
    def _of(cls, home: Home, hold: RefHandle) -> RRef[T]:
        rref = cls.__new__(cls)
        rref._bind(home, hold)
        return rref

    def _bind(self, home: Home, hold: RefHandle) -> None:
        self._home, self.hold = home, hold
        home.refs.watch(self, hold)

    def _pack(self) -> int:
        """It is about to travel: its place among the references of its message."""
        return self._home.refs.pack(self.hold)

    def _lent(self) -> object:
        """What stands for it in a call to its owner, for a caller that waits with it in hand."""
        return self._home.refs.lending.maybe_lent(self.hold) or self

    # -- where it is

    def owner(self) -> WorkerInfo:
        """The worker the value lives on."""
        return self._home.directory.find(self.hold.owner)

    def owner_name(self) -> str:
        """Its name."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self.hold.fork is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has counted it; until then the one it came from is kept."""
        return self._home.refs.is_confirmed(self.hold)

    # -- the value

    def to_here(self, timeout: Timeout = DEFAULT) -> T:
        """The value: itself on its owner, a copy elsewhere. Waits until it is made."""
        deadline = self._home.deadline(timeout)
        if self.is_owner():
            return self._value_here(deadline)
        return cast(T, self._home.calls.fetch(self.hold, deadline))

    def local_value(self) -> T:
        """The value itself, on its owner."""
        return self._value_here(self._home.deadline(DEFAULT))

    def _value_here(self, deadline: float) -> T:
        value = self._home.refs.value_here(self.hold, deadline)
        self._home.calls.lift_above(value)
        return cast(T, value)

    def backward(self, dist_autograd_ctx_id: ContextId = -1, retain_graph: bool = False) -> None:
        """Run backward from the value, into the context's map.

        On its owner, without an id: a plain local backward, into `.grad`.
        """
        if self.is_owner():
            root = checked_tensor(self.local_value())
            if dist_autograd_ctx_id == -1:
                torch.autograd.backward(root, retain_graph=retain_graph)
            else:
                backward(dist_autograd_ctx_id, [root], retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        deadline = self._home.backward_deadline()
        self._home.calls.backward_from(
            self.hold, dist_autograd_ctx_id, retain_graph=retain_graph, deadline=deadline
        )

    # -- its methods

    def rpc_sync(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`rref.rpc_sync().method(…)` runs the method on the owner and returns its result."""
        return Proxy(self, self._home.calls.call, timeout, waits=True)

    def rpc_async(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`rref.rpc_async().method(…)` runs the method on the owner; a future of its result."""
        return Proxy(self, self._home.calls.call_async, timeout)

    def remote(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`rref.remote().method(…)` runs the method on the owner; a reference to its result."""

        def call(to: int, target: Target, deadline: float) -> RRef[Any]:
            created = self._home.calls.remote(to, target, deadline)
            return cast(RRef[Any], self._home.refs.make(created.hold))

        return Proxy(self, call, timeout)

    # -- as an object

    def __repr__(self) -> str:
        what = "owned here" if self.is_owner() else f"on {self.owner_name()} as {self.hold.fork}"
        return f"RRef({self.hold.ref}, {what})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC",
            hint="pass it to rpc_sync, rpc_async or remote: each such copy is counted",
        )


def reference_to(value: T) -> RRef[T]:
    """A reference to a value of this worker, of the kind that its references are."""
    refs = current_worker.find().refs
    return cast(RRef[T], refs.make(refs.keep_here(Value(value))))


class Proxy:
    """The methods of the value that a reference points to. One that waits only lends it."""

    __slots__ = ("_call", "_rref", "_timeout", "_waits")

    def __init__(
        self,
        rref: RRef[Any],
        call: Callable[[int, Target, float], Any],
        timeout: Timeout,
        *,
        waits: bool = False,
    ) -> None:
        self._rref, self._call, self._timeout, self._waits = rref, call, timeout, waits

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            rref = self._rref
            home, hold = rref._home, rref.hold
            first = rref._lent() if self._waits else rref
            target = Target(f".{name}", (first, *args), kwargs)
            return self._call(hold.owner, target, home.deadline(self._timeout))

        method.__name__ = name
        return method

    def __repr__(self) -> str:
        return f"<methods of {self._rref!r}>"


__all__ = ["Future", "RRef"]
