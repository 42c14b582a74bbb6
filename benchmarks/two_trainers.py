"""Two trainers, one model: a step in place, one that waits, and one with new storage.

The slow trainer computes for a while between its forward and its backward; the fast one does not.
While the slow one takes its steps, the steps of the fast one are counted, and those that raise.
Three workers in one process; gradwire alone, because it compares three designs of gradwire.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn

import gradwire
from benchmarks.measure import Row, Run, row
from gradwire.testing import cluster

SLOW_STEPS, PAUSE, SECONDS = 40, 0.05, 30.0


@gradwire.expose
class Server:
    """The shared model, with two ways to step: in place, or after all contexts that use it."""

    def __init__(self, waits):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.waits, self.changed = waits, threading.Condition(threading.RLock())
        self.using, self.stepping = set(), 0

    def parameters(self):
        return [gradwire.RRef(parameter) for parameter in self.model.parameters()]

    def forward(self, context, x):
        with self.changed:  # a waiting step goes first, or it would wait forever
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
    """The number of steps, and of those that raised."""
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


def both_trainers(how, slow_steps):
    """The steps of the fast trainer; those that raised, of the fast and of the slow one."""
    server = gradwire.RRef(Server(how == "waits"))
    OVER[how] = threading.Event()
    args = [
        (server, how == "swaps", pause, n, how) for pause, n in ((0, 10**9), (PAUSE, slow_steps))
    ]
    fast, slow = [gradwire.rpc_async(f"w{n + 1}", train, args=a) for n, a in enumerate(args)]
    _, slow_raised = slow.wait()
    taken, raised = fast.wait()
    return taken, raised, slow_raised


def rows(run: Run) -> Iterator[Row]:
    """The steps of the fast trainer while the slow one takes its own; notes say which raised."""
    (slow_steps,) = run.sizes(SLOW_STEPS, tiny=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cluster(3) as workers:
            for how in ("in place", "waits", "swaps"):
                taken, raised, slow_raised = workers[0].run(both_trainers, how, slow_steps)
                samples = {"gradwire": [[float(taken)]]}
                note = f"raised: {raised} of {taken} fast steps, {slow_raised} of {slow_steps} slow"
                measure = f"{how}: fast steps beside {slow_steps} slow"
                yield row("two_trainers", measure, samples, "", more_is_better=True, note=note)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "two_trainers", *sys.argv[1:]])
