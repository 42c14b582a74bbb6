"""What makes the backend FAULTY_TENSORPIPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradwire.compat.rpc import backend_registry, constants
from gradwire.compat.rpc._testing.faults import FaultPlan
from gradwire.compat.rpc.agent import TensorPipeAgent
from gradwire.compat.rpc.options import TensorPipeRpcBackendOptions
from gradwire.rpc.behavior import Behavior


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which messages fail and how often, and which come late, by how many seconds."""

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method
        )
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent whose channels do not always do what they are told."""

    def _behavior(self, opts: TensorPipeRpcBackendOptions) -> Behavior:
        assert isinstance(opts, FaultyTensorPipeRpcBackendOptions)
        faults = FaultPlan(opts.messages_to_fail, opts.num_fail_sends, opts.messages_to_delay)
        return replace(super()._behavior(opts), channel=faults.wrap)


def _options(rpc_timeout: float, init_method: str, **more: Any) -> object:  # noqa: ANN401
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout, init_method=init_method, **more
    )


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend(
        "FAULTY_TENSORPIPE",
        _options,
        partial(backend_registry._start_agent, agent_class=FaultyTensorPipeAgent),
    )
