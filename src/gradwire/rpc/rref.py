"""RRef: the public class for a reference to a value on one worker, held by any worker.

refs/state.py counts the references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import torch

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.autograd.api import backward, checked_tensor
from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.ids import ContextId
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.actors.messages import ActorCall
from gradwire.rpc.calls.client import Target
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.refs import Value

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on its owner; `RRef(value)` makes one to a value of this worker.

    The value lives as long as any worker holds a reference to it. Calls may pass and return it.
    """

    __slots__ = ("__weakref__", "_home", "handle")

    def __init__(self, value: T) -> None:
        home: Worker = current_worker.find()
        self._bind(home, home.refs.keep_here(Value(value)))

    @classmethod
    def _of(cls, home: Worker, handle: RefHandle) -> RRef[T]:
        rref = cls.__new__(cls)
        rref._bind(home, handle)
        return rref

    def _bind(self, home: Worker, handle: RefHandle) -> None:
        self._home, self.handle = home, handle
        home.refs.watch(self, handle)

    def _pack(self) -> int:
        """Add it to the message being packed; its index there. Called by the codec."""
        return self._home.refs.pack(self.handle)

    def _lent(self) -> object:
        """What to send in a call to its owner if the caller waits: see refs/refs.py."""
        return self._home.refs.maybe_lent(self.handle) or self

    def owner(self) -> WorkerInfo:
        """The worker the value lives on."""
        return self._home.directory.find(self.handle.owner)

    def owner_name(self) -> str:
        """The name of the worker the value lives on."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self.handle.fork is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has counted this reference."""
        return self._home.refs.is_confirmed(self.handle)

    def to_here(self, timeout: Timeout = DEFAULT) -> T:
        """The value: itself on its owner, a copy elsewhere. Waits until it is made."""
        deadline = self._home.deadline(timeout)
        if self.is_owner():
            return self._value_here(deadline)
        return cast(T, self._home.calls.fetch(self.handle, deadline))

    def local_value(self) -> T:
        """The value itself, on its owner."""
        return self._value_here(self._home.deadline(DEFAULT))

    def _value_here(self, deadline: float) -> T:
        value = self._home.refs.value_here(self.handle, deadline)
        self._home.calls.lift_above(value)
        return cast(T, value)

    def backward(self, dist_autograd_ctx_id: ContextId = -1, retain_graph: bool = False) -> None:
        """Run backward from the value; gradients go into the context's map.

        On the owner and without an id: a plain local backward, into `.grad`.
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
        context, deadline = dist_autograd_ctx_id, self._home.backward_deadline(DEFAULT)
        calls = self._home.calls
        calls.backward_from(self.handle, context, retain_graph=retain_graph, deadline=deadline)

    def rpc_sync(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`rref.rpc_sync().method(…)` runs the method on the owner and returns its result."""
        return MethodProxy(self, self._home.calls.call, timeout, _waits=True)

    def rpc_async(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`rref.rpc_async().method(…)` runs the method on the owner; a future of its result."""
        return MethodProxy(self, self._home.calls.call_async, timeout)

    def remote(self, timeout: Timeout = DEFAULT) -> Any:  # noqa: ANN401
        """`rref.remote().method(…)` runs the method on the owner; a reference to its result."""

        def call(to: int, target: Target, deadline: float) -> RRef[Any]:
            created = self._home.calls.remote(to, target, deadline)
            return cast(RRef[Any], self._home.refs.make(created.handle))

        return MethodProxy(self, call, timeout)

    def __repr__(self) -> str:
        what = "owned here" if self.is_owner() else f"on {self.owner_name()} as {self.handle.fork}"
        return f"RRef({self.handle.ref}, {what})"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC",
            hint="pass it to rpc_sync, rpc_async or remote, which count each copy",
        )


def reference_to(value: T) -> RRef[T]:
    """A reference to a value of this worker, of the class that this worker uses."""
    refs = current_worker.find().refs
    return cast(RRef[T], refs.make(refs.keep_here(Value(value))))


@dataclass(slots=True, eq=False, repr=False)
class MethodProxy:
    """The methods of the value that a reference points to, as remote calls.

    `_waits`: the caller waits for the result, so the reference is only lent (refs/refs.py).
    """

    _rref: RRef[Any]
    _call: Callable[[int, Target, float], Any]
    _timeout: Timeout
    _waits: bool = False
    _most: int = 0
    """of an actor: how many of its methods may run at a time"""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            rref = self._rref
            first = rref._lent() if self._waits else rref
            wrap = partial(ActorCall, rref.handle.ref, self._most) if self._most else None
            target = Target(f".{name}", (first, *args), kwargs, wrap=wrap)
            return self._call(rref.handle.owner, target, rref._home.deadline(self._timeout))

        method.__name__ = name
        return method

    def __repr__(self) -> str:
        return f"<methods of {self._rref!r}>"
