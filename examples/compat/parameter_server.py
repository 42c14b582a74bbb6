"""A parameter server that updates once per batch of gradients, one from every trainer.

Written for torch.distributed.rpc, and for nothing else:

    python examples/compat/parameter_server.py
    python -m gradwire.compat examples/compat/parameter_server.py
"""

import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim

TRAINERS = 2
ROUNDS = 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


class ParameterServer:
    """Collects the gradients of all trainers; each gets the same new model as its answer."""

    def __init__(self, trainers: int):
        self.model = make_model()
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.trainers = trainers
        self.arrived = 0
        self.lock = threading.Lock()
        self.future = torch.futures.Future()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(server_rref, gradients):
        self = server_rref.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient
            self.arrived += 1
            future = self.future
            if self.arrived == self.trainers:
                for parameter in self.model.parameters():
                    parameter.grad /= self.trainers
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.arrived = 0
                self.future = torch.futures.Future()
                future.set_result(self.model)
        return future


class Trainer:
    """Fits a function of four numbers on data of its own."""

    def __init__(self, server_rref, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.server_rref = server_rref
        self.inputs = torch.randn(32, 4, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True).tanh()

    def train(self) -> list[float]:
        losses = []
        model = self.server_rref.rpc_sync().get_model()
        for _ in range(ROUNDS):
            loss = nn.functional.mse_loss(model(self.inputs), self.targets)
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            model = rpc.rpc_sync(
                self.server_rref.owner(),
                ParameterServer.update_and_fetch_model,
                args=(self.server_rref, gradients),
            )
        return losses


def run_trainer(server_rref, seed: int) -> list[float]:
    return Trainer(server_rref, seed).train()


def run_server() -> None:
    server_rref = rpc.RRef(ParameterServer(TRAINERS))
    futures = [
        rpc.rpc_async(f"trainer{n}", run_trainer, args=(server_rref, n)) for n in range(TRAINERS)
    ]
    for n, losses in enumerate(torch.futures.wait_all(futures)):
        for step, loss in enumerate(losses):
            print(f"trainer {n} step {step} loss {loss!r}")
    assert losses[-1] < losses[0]


def run(rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, init_method=init_method)
    name = "server" if rank == 0 else f"trainer{rank - 1}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        run_server()
    rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        meeting = (Path(place) / "meeting").as_uri()
        mp.spawn(run, args=(TRAINERS + 1, meeting), nprocs=TRAINERS + 1, join=True)
