"""A parameter server: two trainers share one model, which lives on a third worker.

Each trainer has its own contexts. `gradwire.backward(context, [loss])` keeps the gradients in the
context rather than in `.grad`, so the two never mix. A step does not write into the weights, which
the other trainer's graph may still need: it makes new ones. So every gradient is exact for the
weights it was computed with, however the two interleave.
"""

import copy
import threading

import torch
from torch import nn

import gradwire

STEPS, RATE = 100, 0.1


class Server:
    """The shared model. It lives on w0."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.used = {}  # the model of each context
        self.turn = threading.Lock()
        self.steps = 0

    def forward(self, context, x):
        self.used[context] = self.model
        return self.used[context](x)

    def step(self, context):
        """Apply a context's gradients to the newest weights; what was used, and the gradients."""
        used = self.used.pop(context)
        by_leaf = gradwire.get_gradients(context)
        gradients = [by_leaf[weight] for weight in used.parameters()]
        with self.turn, torch.no_grad():
            newest = copy.deepcopy(self.model)
            for weight, gradient in zip(newest.parameters(), gradients, strict=True):
                weight -= RATE * gradient
            self.model = newest
            self.steps += 1
        return used.state_dict(), gradients

    def held_out_loss(self):
        """The loss on numbers that no trainer has seen."""
        x = torch.randn(256, 2, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            return nn.functional.mse_loss(self.model(x), product(x)).item()


def product(x):
    """What is to be learned."""
    return x[:, :1] * x[:, 1:]


def train(server, seed):
    """Runs on a trainer. The number of steps whose gradients it checked."""
    torch.manual_seed(seed)
    for _ in range(STEPS):
        x = torch.randn(64, 2)
        y = product(x)
        with gradwire.context() as context:
            loss = nn.functional.mse_loss(server.rpc_sync().forward(context, x), y)
            gradwire.backward(context, [loss])
            used, gradients = server.rpc_sync().step(context)
        check(used, gradients, x, y)
    return STEPS


def check(used, gradients, x, y):
    """The gradients are those of the very weights that were used, computed here again."""
    local = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    local.load_state_dict(used)
    nn.functional.mse_loss(local(x), y).backward()
    for weight, gradient in zip(local.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, weight.grad)


def main():
    server = gradwire.RRef(Server())
    before = server.local_value().held_out_loss()
    trainers = [
        gradwire.rpc_async(to, train, args=(server, n)) for n, to in enumerate(["w1", "w2"])
    ]
    checked = sum(trainer.wait() for trainer in trainers)
    after = server.local_value().held_out_loss()
    print(f"{checked} steps, every gradient checked; loss {before:.3f} before, {after:.3f} after")
    assert checked == server.local_value().steps == 2 * STEPS
    assert after < before / 2


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
