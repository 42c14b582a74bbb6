"""rpc_sync, rpc_async and remote as torch.distributed.rpc has them, on gradwire's own calls.

Programs look private names up here and replace some of them, so what is called late is called
through this module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.futures import Future

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.autograd.graph.walk import tensors_in
from gradwire.autograd.scope import inside
from gradwire.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.failures import of_call
from gradwire.compat.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    run_builtin,
    run_function,
    run_serialized,
)
from gradwire.compat.rpc.references import PyRRef, RRef, beside
from gradwire.compat.rpc.world import (
    AllGatherStates,
    RpcAgent,
    TensorPipeAgent,
    _all_gather,
    _barrier,
    _broadcast_to_followers,
    _delete_all_user_and_unforked_owner_rrefs,
    _finalize_shutdown,
    _gather_to_leader,
    _get_current_rpc_agent,
    _init_rpc_states,
    _is_current_rpc_agent_set,
    _require_initialized,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _to_worker_info,
    _wait_all_workers,
    get_rpc_timeout,
    get_worker_info,
    patience,
    shutdown,
)
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, PeerError
from gradwire.rpc.api import keywords, of_sequence
from gradwire.rpc.calls.client import Target
from gradwire.rpc.expose.async_execution import LATER
from gradwire.rpc.worker import Worker

__all__ = [
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "AllGatherStates",
    "Future",
    "PyRRef",
    "RPCExecMode",
    "RRef",
    "RpcAgent",
    "TensorPipeAgent",
    "WorkerInfo",
    "_all_gather",
    "_barrier",
    "_broadcast_to_followers",
    "_build_rpc_profiling_key",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_finalize_shutdown",
    "_gather_to_leader",
    "_get_current_rpc_agent",
    "_init_rpc_states",
    "_is_current_rpc_agent_set",
    "_require_initialized",
    "_reset_current_rpc_agent",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_wait_all",
    "_wait_all_workers",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_ignore_rref_leak = True
_default_pickler = _internal_rpc_pickler
_thread_local_var = threading.local()
_ALL_WORKER_NAMES: set[str] = set()

method_name = "to_here"
"""A variable that a loop has left behind in torch's module, and that editors offer for import."""


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:  # noqa: ANN401
    """Pack functions and their arguments with a pickler of the program's own, in the block."""
    global _default_pickler  # programs look at this name
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for every call that was begun in it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


@_require_initialized
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,  # noqa: ANN401
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:  # noqa: ANN401
    """Run a function on another worker and return what it returned."""
    worker, info, target = _prepared(to, func, args, kwargs)
    with _recorded(target):
        try:
            return worker.calls.call(info.id, target, worker.deadline(patience(timeout)))
        except (PeerError, DeadlinePassed) as error:
            raise of_call(error, worker.directory) from error.__cause__


@_require_initialized
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,  # noqa: ANN401
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Run a function on another worker; a future of what it returns.

    What keeps the call from leaving is in the future too.
    """
    worker, info, target = _prepared(to, func, args, kwargs)
    with _recorded(target):
        try:
            limit = worker.deadline(patience(timeout))
            future = worker.calls.call_async(info.id, target, limit)
        except (PeerError, DeadlinePassed) as error:
            future = worker.calls.failed(of_call(error, worker.directory))
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


@_require_initialized
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,  # noqa: ANN401
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> PyRRef[Any]:
    """Run a function on another worker and keep the result there; a reference to it."""
    worker, info, target = _prepared(to, func, args, kwargs)
    with _recorded(target):
        try:
            created = worker.calls.remote(info.id, target, worker.deadline(patience(timeout)))
        except (PeerError, DeadlinePassed) as error:
            return PyRRef.never_made(worker, info.id, error)
    return PyRRef.made_by(worker, created)


def _prepared(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any,  # noqa: ANN401
    kwargs: dict[str, Any] | None,
) -> tuple[Worker, WorkerInfo, Target]:
    if not callable(func):
        raise TypeError("function should be callable.")
    return _here(), _to_worker_info(to), _target(func, of_sequence(args), keywords(kwargs))


def _target(func: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> Target:
    operator = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]
    if operator is not None:
        return Target(f"!{operator}", (run_builtin, operator, args, kwargs), {})
    name = _spoken(func)
    udf = PythonUDF(func, args, kwargs)
    if _default_pickler is not _internal_rpc_pickler:
        references: list[PyRRef[Any]] = []
        with beside(references):
            data, tensors = _default_pickler.serialize(udf)
        return Target(f"!{name}", (run_serialized, data, tensors, references), {})
    return Target(f"!{name}", (run_function, udf), {})


def _spoken(func: Callable[..., Any]) -> str:
    """The name of a function in errors and profiles."""
    scripted = getattr(func, LATER, func)
    if isinstance(scripted, torch._C.ScriptFunction):
        return str(scripted.qualified_name).removeprefix("__torch__.")
    return str(getattr(func, "__qualname__", type(func).__qualname__))


@contextlib.contextmanager
def _recorded(target: Target) -> Iterator[None]:
    """An operator without a tensor that wants a gradient is no part of the context."""
    function, *rest = target.args
    wanted = function is not run_builtin or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(rest))
    )
    with contextlib.nullcontext() if wanted else inside(None):
        yield


def _rref_typeof_on_owner(rref: PyRRef[Any], blocking: bool = True) -> Any:  # noqa: ANN401
    """Its type, or where that has no name by which it could travel, the nearest base that has one.

    torch.fx makes a class for each module.
    """
    kind = rref._get_type(blocking=blocking)
    if not isinstance(kind, type):
        return kind
    return next(base for base in kind.__mro__ if "<locals>" not in base.__qualname__)


def _rref_typeof_on_user(
    rref: PyRRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
) -> Any:  # noqa: ANN401
    return rref._get_type(timeout, blocking)


def _here() -> Worker:
    return cast(Worker, current_worker.find())
