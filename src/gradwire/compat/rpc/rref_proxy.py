"""RRef with the names and texts of torch.distributed.rpc, and the proxy for calls of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from gradwire.agent.agent import Outcome
from gradwire.agent.requests.promise import Promise
from gradwire.compat.rpc import api
from gradwire.compat.rpc.agent import _is_current_rpc_agent_set, patience
from gradwire.compat.rpc.constants import UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.failures import of_fetch, timed_out
from gradwire.errors import CallTimeout, UsageError
from gradwire.ids import WorkerId
from gradwire.rpc import rref as native
from gradwire.rpc.calls.client import Created
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.expose.async_execution import result_of
from gradwire.rpc.worker import Worker

T = TypeVar("T")
_SCRIPTED = (torch.jit.ScriptModule, torch._C.ScriptModule)

_beside: ContextVar[list[PyRRef[Any]] | None] = ContextVar("gradwire beside", default=None)


@contextmanager
def beside(references: list[PyRRef[Any]]) -> Iterator[None]:
    """Where the references go of what a pickler of the program's own packs or unpacks in the block.

    The pickle has their places in this list, which is an argument of its own: so each is counted.
    """
    token = _beside.set(references)
    try:
        yield
    finally:
        _beside.reset(token)


class PyRRef(native.RRef[T]):
    """A reference to a value on its owner."""

    def __init__(self, value: T, type_hint: object = None) -> None:
        if not _is_current_rpc_agent_set():
            raise RuntimeError(
                "Current RPC agent is not set! Did you initialize the RPC framework "
                "(e.g. by calling `rpc.init_rpc`)?"
            )
        super().__init__(value)

    _answer: Promise[Outcome] | None = None
    _type: torch.futures.Future[type] | None = None
    _profiling: torch.futures.Future[Any] | None = None

    @classmethod
    def made_by(cls, home: Worker, created: Created) -> PyRRef[T]:
        """The reference that `remote` returns; the call that makes its value may still fail."""
        made = cls._of(home, created.handle)
        assert isinstance(made, PyRRef)
        made._answer = created.answer
        if created.is_profiled:
            made._profiling = made._get_future()
        return made

    @classmethod
    def never_made(cls, home: Worker, owner: WorkerId, error: Exception) -> PyRRef[T]:
        """What `remote` returns if its call was not sent; each use of it raises the error."""
        made = cls.__new__(cls)
        made._home, made.handle = home, home.refs.keep_elsewhere(owner)
        home.refs.creation_undone(made.handle)
        made._answer = Promise()
        made._answer.settle(error)
        return made

    # -- the value

    def to_here(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> T:
        """The value: itself on its owner, a copy elsewhere."""
        self._check_usable("to_here() on it")
        try:
            return super().to_here(patience(timeout))
        except CallTimeout as error:
            raise timed_out(error) from None

    def local_value(self) -> T:
        """The value itself, on its owner."""
        if not self.is_owner():
            here, owner = self._home.directory.me, self.owner()
            raise RuntimeError(
                f"For {self._spoken()}, can't call localValue() on user {here}. "
                f"Call it on owner {owner}"
            )
        return super().local_value()

    def _get_type(self, timeout: float | None = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:  # noqa: ANN401
        if self._type is None:
            if self.is_owner():
                self._type = torch.futures.Future()
                self._type.set_result(type(self.local_value()))
            else:
                typeof = api._rref_typeof_on_owner
                self._type = api.rpc_async(self.owner(), typeof, (self,), timeout=timeout)
        return self._type.wait() if blocking else self._type

    def _get_future(self) -> torch.futures.Future[None]:
        """Done when the owner has made the value."""
        future: torch.futures.Future[None] = torch.futures.Future()

        def complete(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                error = of_fetch(outcome, self._home.directory)
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(None)

        if self._answer is None:
            future.set_result(None)
        else:
            self._answer.on_settled(complete)
        return future

    def _check_usable(self, what: str) -> None:
        answer = self._answer
        if answer is not None and answer.settled and isinstance(answer.wait(), Exception):
            raise RuntimeError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on "
                f"the owner node does not exist: {answer.wait()}"
            )
        if self._home.refs.abandoned and not self.is_owner():
            raise RuntimeError(
                f"{self._spoken()} has been deleted. Cannot call {what} after deletion."
            )

    def _pack(self) -> int:
        self._check_usable("fork an UserRRef")
        return super()._pack()

    def _serialize(self) -> tuple[int]:
        references = _beside.get()
        if references is None:
            self.__reduce__()
        references.append(self)
        return (len(references) - 1,)

    @staticmethod
    def _deserialize(said: tuple[int]) -> PyRRef[Any]:
        references = _beside.get()
        if references is None:
            raise UsageError(
                "a reference can not be unpickled outside of a call",
                hint="pass it to rpc_sync, rpc_async or remote: each such copy is counted",
            )
        return references[said[0]]

    def __reduce__(self) -> NoReturn:
        self._check_usable("fork an UserRRef")
        super().__reduce__()

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        if self._profiling is None:
            raise RuntimeError("Profiling future has not been set!")
        return self._profiling

    def _set_profiling_future(self, future: torch.futures.Future[Any]) -> None:
        self._profiling = future

    # -- its methods

    def rpc_sync(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> Any:  # noqa: ANN401
        """`rref.rpc_sync().method(…)` runs the method on the owner and returns its result."""
        return RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> Any:  # noqa: ANN401
        """`rref.rpc_async().method(…)` runs the method on the owner; a future of its result."""
        return RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float | None = UNSET_RPC_TIMEOUT) -> Any:  # noqa: ANN401
        """`rref.remote().method(…)` runs the method on the owner; a reference to its result."""
        return RRefProxy(self, api.remote, timeout)

    def _spoken(self) -> str:
        return f"UserRRef(rref_id={_id(self.handle.ref)}, fork_id={_id(self.handle.fork)})"

    def __str__(self) -> str:
        if self.is_owner():
            return f"OwnerRRef({_id(self.handle.ref)})"
        return f"UserRRef(RRefId = {_id(self.handle.ref)}, ForkId = {_id(self.handle.fork)})"


RRef = PyRRef


def _id(id: Any) -> str:  # noqa: ANN401
    return f"GloballyUniqueId(created_on={id.worker}, local_id={id.n})"


class RRefProxy:
    """What `rref.rpc_sync()`, `rref.rpc_async()` and `rref.remote()` return."""

    def __init__(
        self,
        rref: PyRRef[Any],
        rpc_api: Callable[..., Any],
        timeout: float | None = UNSET_RPC_TIMEOUT,
    ) -> None:
        self.rref, self.rpc_api, self.rpc_timeout = rref, rpc_api, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self, name)


def _invoke(proxy: RRefProxy, name: str, /, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
    """Call a method, once the value is known to have it."""
    rref, rpc_api, timeout = proxy.rref, proxy.rpc_api, proxy.rpc_timeout

    def call(kind: Any) -> Any:  # noqa: ANN401
        _check(rref, kind.value(), name, timeout)
        return rpc_api(rref.owner(), call_method, (rref, name, args, kwargs), timeout=timeout)

    known = rref._get_type(timeout=timeout, blocking=False)
    if rpc_api.__name__ == "rpc_async" and isinstance(known, Future) and not known.done():
        here = copy_context()  # not where the type was first asked for
        return known.follow(lambda kind: here.run(call, kind))
    known.wait()
    return call(known)


def _check(rref: PyRRef[Any], kind: type, name: str, timeout: float | None) -> None:
    """Raise here what Python would say if the value had no such method.

    Mostly its type tells. If not, its owner is asked: a method may stand on the object itself, or
    come from its `__getattr__`, as those of TorchScript and of compiled modules do.
    """
    if hasattr(kind, name) or issubclass(kind, _SCRIPTED):
        return
    if not api.rpc_sync(rref.owner(), _has_attribute, (rref, name), timeout=timeout):
        raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")


def _has_attribute(rref: PyRRef[Any], name: str) -> bool:
    return hasattr(rref.local_value(), name)


def call_method(rref: PyRRef[Any], name: str, args: Any, kwargs: Any) -> object:  # noqa: ANN401
    """Runs on the owner."""
    return result_of(getattr(rref.local_value(), name), *args, **kwargs)
