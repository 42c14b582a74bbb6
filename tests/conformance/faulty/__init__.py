"""The backend FAULTY_TENSORPIPE: ours, with messages lost and delayed on purpose.

In the place of torch.distributed.rpc._testing, which only torch's own suites use.
"""

from tests.conformance.faulty import faulty_agent_backend_registry
from tests.conformance.faulty.faulty_agent_backend_registry import (
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
