"""Calls, all-gather and shutdown as torch.distributed.rpc has them, on gradwire's own.

Programs replace some functions of this module: others look them up here when they call them.
"""
# ruff: noqa: F401

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.futures import Future

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.autograd.scope import inside
from gradwire.compat.rpc.agent import (
    RpcAgent,
    TensorPipeAgent,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    get_rpc_timeout,
    patience,
)
from gradwire.compat.rpc.all_gather import all_gather
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
from gradwire.compat.rpc.rref_proxy import PyRRef, RRef, beside
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, GradwireError, PeerError
from gradwire.options import FOREVER
from gradwire.rpc.api import keywords, of_sequence
from gradwire.rpc.calls.client import Target
from gradwire.rpc.codec.tensors_of import tensors_in
from gradwire.rpc.expose.async_execution import LATER
from gradwire.rpc.groups.all_gather_state import Rounds
from gradwire.rpc.worker import Worker

__all__ = [  # torch's
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("gradwire")
_ignore_rref_leak = True
_default_pickler = _internal_rpc_pickler
_thread_local_var = threading.local()
_ALL_WORKER_NAMES: set[str] = set()

method_name = "to_here"
"""A variable that a loop has left behind in torch's module, and that editors offer for import."""


def _require_initialized(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, for workers only."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise RuntimeError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return function(*args, **kwargs)

    return checked


# -- calls


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
    timeout: float | None = UNSET_RPC_TIMEOUT,
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
    timeout: float | None = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
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
    timeout: float | None = UNSET_RPC_TIMEOUT,
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
    worker = cast(Worker, current_worker.find())
    return worker, _to_worker_info(to), _target(func, of_sequence(args), keywords(kwargs))


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


def _recorded(target: Target) -> contextlib.AbstractContextManager[None]:
    """An operator without a tensor that wants a gradient is no part of the context."""
    function, *rest = target.args
    wanted = function is not run_builtin or (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(rest))
    )
    return contextlib.nullcontext() if wanted else inside(None)


def _rref_typeof_on_owner(rref: PyRRef[Any], blocking: bool = True) -> Any:  # noqa: ANN401
    """Its type, or the nearest base that can be serialized: torch.fx makes a class per module."""
    kind = rref._get_type(blocking=blocking)
    if not isinstance(kind, type):
        return kind
    return next(base for base in kind.__mro__ if "<locals>" not in base.__qualname__)


def _rref_typeof_on_user(
    rref: PyRRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
) -> Any:  # noqa: ANN401
    return rref._get_type(timeout, blocking)


# -- the workers


def _init_rpc_states(agent: RpcAgent) -> None:
    infos = getattr(agent, "get_worker_infos", tuple)  # a program's own backend may have none
    global _ALL_WORKER_NAMES  # programs look at this name
    _ALL_WORKER_NAMES = {info.name for info in infos()}
    if not _is_current_rpc_agent_set():  # a backend may have done so itself
        _set_and_start_rpc_agent(agent)


@_require_initialized
def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """The name and number of a worker; of this one without an argument."""
    agent = _get_current_rpc_agent()
    return agent.get_worker_info() if worker_name is None else agent.get_worker_info(worker_name)


def _to_worker_info(to: object) -> WorkerInfo:
    if not isinstance(to, str | int | WorkerInfo):
        raise ValueError(f"Cannot get WorkerInfo from name {to}")
    return get_worker_info(to)


# -- all-gather


class AllGatherStates:
    """One round of an all-gather. Not used here, but by programs that gather by themselves."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, object] = {}
        self.proceed_signal = threading.Event()


def _ours() -> Worker:
    return cast(TensorPipeAgent, _get_current_rpc_agent()).worker


@_require_initialized
def _all_gather(
    obj: object,
    worker_names: Collection[str] | None = None,
    timeout: float | None = UNSET_RPC_TIMEOUT,
) -> dict[str, object]:
    """The objects of all workers by name, once each of them has called this.

    Without a timeout only the messages have one; then the slowest worker is waited for.
    """
    worker, seconds = _ours(), patience(timeout)
    me, gathers = worker.name, worker.part(all_gather)
    names = set(worker_names or [info.name for info in worker.directory.all()])
    wait_seconds = FOREVER if timeout == UNSET_RPC_TIMEOUT else seconds
    leader, *followers = sorted(names)
    with gathers.round(names) as round:
        if me != leader:
            rpc_sync(leader, _gather_to_leader, (round, me, obj, names), timeout=seconds)
            return gathers.wait(round, names, wait_seconds)
        _gather_to_leader(round, me, obj, names)
        try:
            values = gathers.wait(round, names, wait_seconds)
        except GradwireError as error:
            for name in followers:  # each hears it, or is lost itself
                rpc_async(name, _all_gather_failed, (round, error.message), timeout=seconds)
            raise
        args = (round, values)
        sent = {n: rpc_async(n, _broadcast_to_followers, args, timeout=seconds) for n in followers}
        _wait_for_followers(sent, seconds)
        return values


def _wait_for_followers(sent: Mapping[str, Future[Any]], seconds: float) -> None:
    errors: dict[str, Exception] = {}
    for name, future in sent.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        raise RuntimeError(
            f"Followers {list(errors)} timed out in _all_gather after "
            f"{seconds:.2f} seconds. The first exception is {first}"
        ) from first


# Each of these three is sent by name: it is the function that the program of the receiver has.


def _all_gather_failed(sequence_id: str, reason: str) -> None:
    _ours().part(all_gather).note(Rounds.failed, sequence_id, reason)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: object, worker_names: Collection[str]
) -> None:
    gathers = _ours().part(all_gather)
    gathers.note(Rounds.contributed, sequence_id, worker_name, obj, worker_names)


def _broadcast_to_followers(sequence_id: str, objects_map: Mapping[str, object]) -> None:
    _ours().part(all_gather).note(Rounds.concluded, sequence_id, objects_map)


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Wait until all of these workers have called this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        _log.exception("a barrier of %s failed", ", ".join(sorted(worker_names)))


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        _log.exception("not every worker was ready to leave in time")
        raise


# -- leaving


def _delete_all_user_and_unforked_owner_rrefs(
    timeout: timedelta = timedelta(seconds=100),  # a constant
) -> None:
    worker = _ours()
    worker.refs.wait_until_settled(worker.agent.clock.now() + timeout.total_seconds())
    worker.refs.abandon()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave. Gracefully: with all others and when nothing is in flight; alone in an open world."""
    agent = _get_current_rpc_agent()
    if isinstance(agent, TensorPipeAgent) and agent.worker.is_forked:
        _reset_current_rpc_agent()
        return
    try:
        if graceful:
            if not isinstance(agent, TensorPipeAgent) or agent.is_static_group:
                _wait_all_workers(timeout)
                _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown(agent)


def _finalize_shutdown(agent: RpcAgent) -> None:
    leaks = agent.leaks() if isinstance(agent, TensorPipeAgent) else []
    try:
        if leaks and not _ignore_rref_leak:
            raise RuntimeError(f"Leaking RRef {', Leaking RRef '.join(leaks)}")
    finally:
        agent.shutdown()
        _reset_current_rpc_agent()
