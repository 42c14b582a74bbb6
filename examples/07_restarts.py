"""Training continues after workers die: a step is retried until no worker is lost in it.

w1 and w2 each hold half of a model. Twice, one of them is killed during a step. `run` restarts it;
`retrying` waits until it is back, calls `restore`, and runs the step again. The losses are bit for
bit those of training in one process.
"""

import logging
import os
import signal
import sys

import torch
from torch import nn

import gradwire

STEPS, KILLS = 12, {3: "w1", 8: "w2"}
torch.set_default_dtype(torch.float64)


class Half(nn.Module):
    """Half of the model; its initial weights depend only on its number."""

    def __init__(self, n):
        super().__init__()
        torch.manual_seed(n)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def loss_of(halves, step):
    x, wanted = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
    for half in halves:
        x = half(x)
    return (x - wanted).square().mean()


class Training:
    """The model on its workers, and the last checkpoint."""

    def __init__(self):
        self.saved, self.restored = None, 0
        self.make()

    def make(self):
        self.halves = [gradwire.RemoteModule(f"w{n}", Half, (n,)) for n in (1, 2)]
        weights = [weight for half in self.halves for weight in half.parameters()]
        self.optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, weights, lr=0.05)

    def restore(self, attempt):
        print(f"restored after {type(attempt.error).__name__}")
        self.restored += 1
        self.make()
        if self.saved is not None:
            self.optimizer.restore(self.saved)

    def step(self, n):
        for attempt in gradwire.retrying(times=5, restore=self.restore):
            with attempt:
                self.optimizer.zero_grad()
                loss = loss_of(self.halves, n)
                if attempt.number == 0 and n in KILLS:
                    gradwire.rpc_async(KILLS[n], die)
                loss.backward()
                self.optimizer.step()
                saved = self.optimizer.checkpoint()
        self.saved = saved
        return loss.item()


def in_one_process():
    halves = [Half(n) for n in (1, 2)]
    optimizer = torch.optim.Adam([w for half in halves for w in half.parameters()], lr=0.05)
    losses = []
    for n in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(halves, n)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    training = Training()
    losses = [training.step(n) for n in range(STEPS)]
    incarnations = gradwire.incarnation("w1"), gradwire.incarnation("w2")

    print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}; incarnations of w1 and w2: {incarnations}")
    assert incarnations == (1, 1)
    assert training.restored >= 2
    assert losses == in_one_process()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    gradwire.run(main, world_size=3, restarts=1)
