"""Who belongs to a world, as torch.distributed.rpc puts it: begin, end, wait for each other.

A face: joining, leaving and gathering are the core's. Programs replace some functions of `rpc.api`;
those are looked up there when they are called.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from numbers import Integral
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.compat.rpc import backend_registry, constants
from gradwire.compat.rpc.agent import (
    RpcAgent,
    TensorPipeAgent,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    enable_gil_profiling,
    get_rpc_timeout,
    late_api,
    patience,
)
from gradwire.compat.rpc.all_gather import all_gather
from gradwire.compat.rpc.backend_registry import BackendType
from gradwire.compat.rpc.options import RpcBackendOptions
from gradwire.errors import UsageError
from gradwire.options import rank_from_environment
from gradwire.rpc.join import rendezvous_store

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("gradwire")

__all__ = [
    "AllGatherStates",
    "RpcAgent",
    "TensorPipeAgent",
    "_all_gather",
    "_barrier",
    "_broadcast_to_followers",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_finalize_shutdown",
    "_gather_to_leader",
    "_get_current_rpc_agent",
    "_init_rpc_backend",
    "_init_rpc_states",
    "_is_current_rpc_agent_set",
    "_require_initialized",
    "_reset_current_rpc_agent",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_to_worker_info",
    "_wait_all_workers",
    "enable_gil_profiling",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "patience",
    "shutdown",
]


def _require_initialized(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, for workers only."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not late_api()._is_current_rpc_agent_set():
            raise RuntimeError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return function(*args, **kwargs)

    return checked


# -- begin


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a worker; without a world size, one that joins whoever is there.

    Where it meets the others says `rpc_backend_options.init_method`; with env:// a rank that is not
    given is the one that a launcher has set.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if late_api()._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    backend = backend or _backend_of(rpc_backend_options)
    options = rpc_backend_options or backend_registry.construct_rpc_backend_options(backend)
    rank = _rank(rank, options.init_method)
    store = _store(options, rank, world_size)
    _autograd()._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, options)


def _backend_of(options: RpcBackendOptions | None) -> BackendType:
    ours = cast(BackendType, BackendType.TENSORPIPE)
    if options is None:
        return ours
    for candidate in BackendType:
        try:
            made = backend_registry.construct_rpc_backend_options(candidate)
        except TypeError:  # it wants more than the defaults
            continue
        if isinstance(options, type(made)):
            if candidate is not ours:
                _log.warning("the options are those of %r, which is used", candidate)
            return cast(BackendType, candidate)
    raise TypeError(f"Could not infer backend for options {options}")


def _rank(rank: int, init_method: str) -> int:
    if rank == -1 and init_method.startswith("env:"):
        known = rank_from_environment().rank
        return -1 if known is None else known
    return rank


def _store(options: RpcBackendOptions, rank: int, world_size: int | None) -> Store:
    try:
        place = RpcBackendOptions(init_method=options.init_method).for_worker()
        return rendezvous_store(place, None if rank == -1 else rank, world_size or None)
    except UsageError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def _autograd() -> Any:  # noqa: ANN401
    return importlib.import_module("gradwire.compat.autograd")


def _init_rpc_backend(
    backend: Any = None,  # noqa: ANN401
    store: Any = None,  # noqa: ANN401
    name: Any = None,  # noqa: ANN401
    rank: Any = -1,  # noqa: ANN401
    world_size: Any = None,  # noqa: ANN401
    rpc_backend_options: Any = None,  # noqa: ANN401
) -> None:
    backend = BackendType.TENSORPIPE if backend is None else backend
    wanted: list[tuple[object, Any]] = [
        (backend, BackendType),
        (store, torch.distributed.Store),  # type: ignore[attr-defined]
        (name, str),
        (rank, Integral),
        (world_size, (Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    for given, kind in wanted:
        if not isinstance(given, kind):
            raise RuntimeError(f"Argument {given} must be of type {kind} but is a {type(given)}")
    if late_api()._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    late_api()._init_rpc_states(agent)


def _init_rpc_states(agent: RpcAgent) -> None:
    infos = getattr(agent, "get_worker_infos", tuple)  # a program's own backend may have none
    vars(late_api())["_ALL_WORKER_NAMES"] = {info.name for info in infos()}
    if not late_api()._is_current_rpc_agent_set():  # a backend may have done so itself
        late_api()._set_and_start_rpc_agent(agent)


# -- who is there


@_require_initialized
def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """The name and number of a worker; of this one without an argument."""
    agent = cast(RpcAgent, late_api()._get_current_rpc_agent())
    return agent.get_worker_info() if worker_name is None else agent.get_worker_info(worker_name)


def _to_worker_info(to: object) -> WorkerInfo:
    if not isinstance(to, str | int | WorkerInfo):
        raise ValueError(f"Cannot get WorkerInfo from name {to}")
    return get_worker_info(to)


# -- wait for each other


class AllGatherStates:
    """One round of a gathering. Not used here: programs that gather by themselves take it."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, object] = {}
        self.proceed_signal = threading.Event()


def _ours() -> TensorPipeAgent:
    return cast(TensorPipeAgent, late_api()._get_current_rpc_agent())


@_require_initialized
def _all_gather(
    obj: object,
    worker_names: Collection[str] | None = None,
    timeout: float = constants.UNSET_RPC_TIMEOUT,
) -> dict[str, object]:
    """The objects of all workers by name, once each of them has called this.

    Without a timeout only the messages have one; then the slowest worker is waited for.
    """
    agent, api = _ours(), late_api()
    names = set(worker_names or [info.name for info in agent.get_worker_infos()])
    me, seconds = agent.worker.name, patience(timeout)
    is_unset = timeout == constants.UNSET_RPC_TIMEOUT

    def contribute(leader: str, round: str) -> None:
        args = (round, me, obj, names)
        api.rpc_sync(leader, _to_leader_here, args=args, timeout=seconds)

    def conclude(round: str, followers: Collection[str], values: Mapping[str, object]) -> None:
        sent = [
            (name, api.rpc_async(name, _to_follower_here, args=(round, values), timeout=seconds))
            for name in followers
        ]
        _wait_for_followers(sent, seconds)

    def give_up(round: str, followers: Collection[str], story: str) -> None:
        for name in followers:  # each hears it, or is lost itself
            api.rpc_async(name, _failed_here, args=(round, story), timeout=seconds)

    return agent.worker.part(all_gather).gather(
        obj,
        names,
        constants.A_LONG_TIME_SECONDS if is_unset else seconds,
        contribute=contribute,
        conclude=conclude,
        give_up=give_up,
    )


def _wait_for_followers(sent: list[tuple[str, Any]], seconds: float) -> None:
    errors: list[tuple[str, Exception]] = []
    for name, future in sent:
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after "
            f"{seconds:.2f} seconds. The first exception is {errors[0][1]}"
        ) from errors[0][1]


def _to_leader_here(round: str, name: str, value: object, names: Collection[str]) -> None:
    """What runs on the leader: the function that its program has there now."""
    late_api()._gather_to_leader(round, name, value, names)


def _to_follower_here(round: str, values: Mapping[str, object]) -> None:
    """What runs on a follower: the function that its program has there now."""
    late_api()._broadcast_to_followers(round, values)


def _failed_here(round: str, story: str) -> None:
    _ours().worker.part(all_gather).failed(round, story)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: object, worker_names: Collection[str]
) -> None:
    _ours().worker.part(all_gather).heard(sequence_id, worker_name, obj, worker_names)


def _broadcast_to_followers(sequence_id: str, objects_map: Mapping[str, object]) -> None:
    _ours().worker.part(all_gather).ended(sequence_id, objects_map)


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Wait until all of these workers have called this."""
    try:
        late_api()._all_gather(None, set(worker_names))
    except RuntimeError:
        _log.exception("a barrier of %s failed", ", ".join(sorted(worker_names)))


@_require_initialized
def _wait_all_workers(timeout: float = constants.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this."""
    try:
        late_api()._all_gather(None, timeout=timeout)
    except RuntimeError:
        _log.exception("not every worker was ready to leave in time")
        raise


# -- end


def _delete_all_user_and_unforked_owner_rrefs(
    timeout: timedelta = timedelta(seconds=100),  # a constant
) -> None:
    worker = _ours().worker
    worker.refs.wait_until_settled(worker.agent.clock.now() + timeout.total_seconds())
    worker.refs.abandon()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = constants.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave. Gracefully: with all others and when nothing is in flight; alone in an open world."""
    api = late_api()
    agent = api._get_current_rpc_agent()
    if isinstance(agent, TensorPipeAgent) and agent.worker.is_forked:
        api._reset_current_rpc_agent()
        return
    try:
        if graceful:
            if not isinstance(agent, TensorPipeAgent) or agent.is_static_group:
                api._wait_all_workers(timeout)
                api._delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown(agent)


def _finalize_shutdown(agent: RpcAgent) -> None:
    leaks = agent.leaks() if isinstance(agent, TensorPipeAgent) else []
    try:
        if leaks and not late_api()._ignore_rref_leak:
            raise RuntimeError(f"Leaking RRef {', Leaking RRef '.join(leaks)}")
    finally:
        agent.shutdown()
        late_api()._reset_current_rpc_agent()
