"""The backend FAULTY_TENSORPIPE: ours, on links that lose and delay messages on purpose."""

from gradwire.compat.rpc._testing import faulty_agent_backend_registry
from gradwire.compat.rpc._testing.faulty_agent_backend_registry import (
    FaultyTensorPipeAgent,
    FaultyTensorPipeRpcBackendOptions,
)

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    """Always."""
    return True
