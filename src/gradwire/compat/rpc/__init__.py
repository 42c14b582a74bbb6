"""torch.distributed.rpc, on gradwire: how a program begins, and names that programs import here."""
# ruff: noqa: F401

from __future__ import annotations

import logging
from numbers import Integral
from typing import Any, cast

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.compat import autograd as dist_autograd
from gradwire.compat.rpc import _utils, api, backend_registry, functions
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
)
from gradwire.compat.rpc.api import (
    AllGatherStates,
    _delete_all_user_and_unforked_owner_rrefs,
    _wait_all,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from gradwire.compat.rpc.backend_registry import BackendType
from gradwire.compat.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from gradwire.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from gradwire.compat.rpc.rref_proxy import PyRRef, RRef
from gradwire.compat.rpc.server_process_global_profiler import _server_process_global_profile
from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.options import Options, rank_and_size_from_environment
from gradwire.rpc.join import rendezvous_store

__all__ = ["is_available", "init_rpc", "BackendType", "TensorPipeRpcBackendOptions", *api.__all__]

logger = logging.getLogger("gradwire")
_is_tensorpipe_available = True


def is_available() -> bool:
    """Always."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a worker; without a world size, one that joins those present.

    With env:// a rank that is not given is the one that a launcher has set.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    backend = backend or _backend_of(rpc_backend_options)
    options = rpc_backend_options or backend_registry.construct_rpc_backend_options(backend)
    if rank == -1 and options.init_method.startswith("env:"):
        known, _ = rank_and_size_from_environment()
        rank = -1 if known is None else known
    store = _store(options, rank, world_size)
    dist_autograd._init(rank)
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
                logger.warning("the options are those of %r, which is used", candidate)
            return cast(BackendType, candidate)
    raise TypeError(f"Could not infer backend for options {options}")


def _store(options: RpcBackendOptions, rank: int, world_size: int | None) -> Store:
    try:
        place = Options(init_method=options.init_method)
        return rendezvous_store(place, None if rank == -1 else rank, world_size or None)
    except UsageError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


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
        (store, Store),
        (name, str),
        (rank, Integral),
        (world_size, (Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    for given, kind in wanted:
        if not isinstance(given, kind):
            raise RuntimeError(f"Argument {given} must be of type {kind} but is a {type(given)}")
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


def _rref_context_get_debug_info() -> dict[str, str]:
    counts = current_worker.find().refs.statistics()
    return {
        "num_owner_rrefs": str(counts.shared),
        "num_pending_futures": str(counts.pending_children + counts.unacknowledged),
        "num_pending_users": str(counts.pending_users),
        "num_forks": str(counts.forks),
    }


@api._require_initialized
def _get_debug_info() -> dict[str, Any]:
    return {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),
    }
