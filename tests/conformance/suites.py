"""The suites as they ship with torch, made into classes whose ranks are forked, or spawned.

Importing them must come after the substitution. It is done once, by the parent: each test's
processes are forked from it, so that no rank imports torch anew.
"""

from __future__ import annotations

import os
import secrets
from importlib import import_module

_SPAWNED = "CONFORMANCE_SPAWNED"
"""whether ranks are spawned, as CUDA needs it; each imports torch anew"""
_ROOT = "torch.testing._internal.distributed"

MODULES = {
    "DistAutogradTest": "rpc.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": "rpc.dist_autograd_test",
    "FaultyAgentDistAutogradTest": "rpc.dist_autograd_test",
    "DistOptimizerTest": "rpc.dist_optimizer_test",
    "FaultyAgentRpcTest": "rpc.faulty_agent_rpc_test",
    "RpcTest": "rpc.rpc_test",
    "TensorPipeAgentRpcTest": "rpc.rpc_test",
    "TensorPipeAgentCudaRpcTest": "rpc.rpc_test",
    "CudaDistAutogradTest": "rpc.dist_autograd_test",
    "CudaRemoteModuleTest": "nn.api.remote_module_test",
    "RemoteModuleTest": "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": "nn.api.remote_module_test",
    "DdpUnderDistAutogradTest": "ddp_under_dist_autograd_test",
    "DdpComparisonTest": "ddp_under_dist_autograd_test",
    "ParameterServerTest": "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "rpc.examples.reinforcement_learning_rpc_test",
}

FAULTY = {
    "torch.distributed.rpc._testing": "tests.conformance.faulty",
    "torch.distributed.rpc._testing.faulty_agent_backend_registry": (
        "tests.conformance.faulty.faulty_agent_backend_registry"
    ),
}
"""what stands for torch's faulty agent, which programs do not use"""


def set_environment(limit: int, *, gpu: bool = False) -> None:
    """What torch reads when it is imported: no TorchScript, no threads of its own, and a limit.

    And the secret of all workers, which are forked from this process.
    """
    os.environ.pop("GRADWIRE_SECRET_FILE", None)
    os.environ["GRADWIRE_SECRET"] = secrets.token_hex(32)
    os.environ["PYTORCH_JIT"] = "0"
    os.environ[_SPAWNED] = str(int(gpu))
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(limit)


def load(stock: bool) -> None:
    """Import everything that a test needs, with gradwire in torch's place unless `stock`."""
    if not stock:
        compat = import_module("gradwire.compat.substitution")
        compat.install(compat.MODULES | FAULTY)
    for module in sorted(set(MODULES.values())):
        import_module(f"{_ROOT}.{module}")
    import_module(f"{_ROOT}.rpc.tensorpipe_rpc_agent_test_fixture")


def build(suite: str) -> type:
    """The suite with the fixture of its agent, its ranks forked.

    The faulty agent's fixture registers a backend as it is imported, so that happens here, in the
    process of a test that asks for it.
    """
    name = "Faulty" if suite.startswith("Faulty") else "TensorPipe"
    home = import_module(f"{_ROOT}.rpc.{name.lower()}_rpc_agent_test_fixture")
    fixture = getattr(home, f"{name}RpcAgentTestFixture")
    built = type(suite, (getattr(_module(suite), suite), fixture, _forked()), {})
    built.__module__ = __name__
    globals()[suite] = built  # methods of tests travel by name
    return built


def __getattr__(name: str) -> type:
    """A suite, for a rank that was spawned and finds its class by name."""
    if name not in MODULES:
        raise AttributeError(name)
    load(stock=False)
    return build(name)


def _module(suite: str):
    return import_module(f"{_ROOT}.{MODULES[suite]}")


def _forked() -> type:
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    class Forked(MultiProcessTestCase):
        def setUp(self):
            super().setUp()
            way = "spawn" if os.environ.get(_SPAWNED) == "1" else "fork"
            self._start_processes(torch.multiprocessing.get_context(way).Process)

    return Forked
