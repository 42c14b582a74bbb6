"""A parameter server: two trainers share one model, which lives on a third worker.

Each trainer has its own contexts and its own optimizer. `gradwire.backward(context, [loss])` keeps
the gradients in the context rather than in `.grad`, so the two never mix. A step does not write to
the weights, which the other trainer's graph may still need: it gives them new storage. So every
gradient is exact for the weights it was computed with, however the two interleave.
"""

import torch
from torch import nn

import gradwire

STEPS, RATE = 100, 0.1


class Server:
    """The shared model. It lives on w0."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def parameters(self):
        return [gradwire.RRef(parameter) for parameter in self.model.parameters()]

    def forward(self, x):
        """Returns the output, and the weights that each layer used."""
        used = []
        for layer in self.model:
            x, weights = self.through(layer, x)
            used += weights
        return x, used

    def through(self, layer, x):
        """Run one layer; repeat it if the other trainer stepped meanwhile."""
        while True:
            weights = [weight.detach() for weight in layer.parameters()]
            y = layer(x)
            now = [weight.detach() for weight in layer.parameters()]
            if all(torch.equal(a, b) for a, b in zip(weights, now, strict=True)):
                return y, weights

    def gradients(self, context):
        by_leaf = gradwire.get_gradients(context)
        return [by_leaf[weight] for weight in self.model.parameters()]

    def held_out_loss(self):
        """The loss on data that no trainer has seen."""
        x = torch.randn(256, 2, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            return nn.functional.mse_loss(self.model(x), product(x)).item()


def product(x):
    """The function to learn."""
    return x[:, :1] * x[:, 1:]


def train(server, seed):
    """Runs on a trainer; returns the number of steps whose gradients it checked."""
    torch.manual_seed(seed)
    parameters = server.rpc_sync().parameters()
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, parameters, lr=RATE)
    for _ in range(STEPS):
        x = torch.randn(64, 2)
        y = product(x)
        with gradwire.context() as context:
            output, used = server.rpc_sync().forward(x)
            gradwire.backward(context, [nn.functional.mse_loss(output, y)])
            gradients = server.rpc_sync().gradients(context)
            optimizer.step(context)
        check(used, gradients, x, y)
    return STEPS


def check(used, gradients, x, y):
    """Check the gradients against those of a local model with the weights that were used."""
    local = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for weight, value in zip(local.parameters(), used, strict=True):
            weight.copy_(value)
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
    assert checked == 2 * STEPS
    assert after < before / 2


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
