"""torch.distributed.rpc, on gradwire."""

import logging
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.compat import autograd as dist_autograd
from gradwire.compat.rpc import (
    _utils,
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
)
from gradwire.compat.rpc.api import (
    AllGatherStates,
    PyRRef,
    RRef,
    _delete_all_user_and_unforked_owner_rrefs,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _wait_all,
    remote,
    rpc_async,
    rpc_sync,
)
from gradwire.compat.rpc.backend_registry import BackendType
from gradwire.compat.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from gradwire.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from gradwire.compat.rpc.server_process_global_profiler import _server_process_global_profile
from gradwire.compat.rpc.world import (
    RpcAgent,
    TensorPipeAgent,
    _get_current_rpc_agent,
    _init_rpc_backend,
    _is_current_rpc_agent_set,
    _set_rpc_timeout,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    shutdown,
)
from gradwire.current import current_worker

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "AllGatherStates",
    "BackendType",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "Store",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_get_current_rpc_agent",
    "_init_rpc_backend",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_server_process_global_profile",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_utils",
    "_wait_all",
    "api",
    "backend_registry",
    "constants",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger("gradwire")
_is_tensorpipe_available = True


def is_available() -> bool:
    """Always."""
    return True


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
