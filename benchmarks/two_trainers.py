"""Two trainers on one server: a step in place, one that waits, and one that swaps storage.

The slow trainer computes for a while between its forward and its backward; the fast one does not.
Counted while the slow one takes its steps: the steps of the fast one, and those that raise.

    python benchmarks/two_trainers.py
"""
# ruff: noqa: ANN001, ANN201, ANN204, D102, D103

import threading
import time

import torch
from torch import nn

import gradwire
from gradwire.testing import cluster

SLOW_STEPS, PAUSE, SECONDS = 40, 0.05, 30.0


@gradwire.expose
class Server:
    """The shared model, with steps of its own: in place, or after all who use the weights."""

    def __init__(self, waits):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.waits, self.changed = waits, threading.Condition(threading.RLock())
        self.using, self.stepping = set(), 0

    def parameters(self):
        return [gradwire.RRef(parameter) for parameter in self.model.parameters()]

    def forward(self, context, x):
        with self.changed:  # a step that waits goes first, or it would wait for ever
            assert self.changed.wait_for(lambda: not self.waits or not self.stepping, SECONDS)
            self.using.add(context)
        return self.model(x)

    def step(self, context):
        gradients = gradwire.get_gradients(context)
        with self.changed:
            self.done(context)
            self.stepping += 1
            assert self.changed.wait_for(lambda: not self.waits or not self.using, SECONDS)
            for parameter in self.model.parameters():
                parameter.grad = gradients.get(parameter)
            self.optimizer.step()
            self.stepping -= 1
            self.changed.notify_all()

    def done(self, context):
        with self.changed:
            self.using.discard(context)
            self.changed.notify_all()


@gradwire.expose
def train(server, swaps, pause, steps, over):
    """How many steps were taken, and how many of them raised."""
    refs = server.rpc_sync().parameters()
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, refs, lr=0.01) if swaps else None
    taken = raised = 0
    while taken < steps and not OVER[over].is_set():
        taken += 1
        with gradwire.context() as context:
            try:
                loss = server.rpc_sync().forward(context, torch.randn(64, 64)).square().mean()
                time.sleep(pause)
                gradwire.backward(context, [loss])
                if optimizer is None:
                    server.rpc_sync().step(context)
                else:
                    optimizer.step(context)
            except RuntimeError:
                raised += 1
                server.rpc_sync().done(context)
    if pause:
        OVER[over].set()
    return taken, raised


OVER = {}


def measure(how):
    server = gradwire.RRef(Server(how == "waits"))
    OVER[how] = threading.Event()
    args = [
        (server, how == "swaps", pause, n, how) for pause, n in ((0, 10**9), (PAUSE, SLOW_STEPS))
    ]
    fast, slow = [gradwire.rpc_async(f"w{n + 1}", train, args=a) for n, a in enumerate(args)]
    print(f"{how:9} slow {slow.wait()}, fast {fast.wait()}  (steps, raised)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with cluster(3) as workers:
        for way in ("in place", "waits", "swaps"):
            workers[0].run(measure, way)
