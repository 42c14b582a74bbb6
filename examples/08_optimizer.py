"""An optimizer over three workers: a model in three parts, one Adam, a schedule and clipping.

Each part lives on its own worker. The optimizer holds references to the parameters and updates them
where they are. It is a torch.optim.Optimizer, so StepLR can set its learning rate. The same program
in one process gives the same weights, bit for bit.
"""

import torch
from torch import nn

import gradwire

STEPS = 30
torch.set_num_threads(1)


class Part(nn.Module):
    """One layer of the model."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.linear(x))

    def references(self):
        return [gradwire.RRef(parameter) for parameter in self.parameters()]

    def weights(self):
        return [parameter.detach() for parameter in self.parameters()]


def batches():
    """The same data each time."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        x = torch.rand(32, 8, generator=generator)
        yield x, x.flip(1)


def in_one_process():
    """The losses and the weights after training in one process."""
    model = nn.Sequential(*(Part(seed) for seed in range(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def over_workers():
    """The same on three workers, with a part on each of w0, w1 and w2."""
    parts = [gradwire.remote(f"w{n}", Part, args=(n,)) for n in range(3)]
    parameters = [ref for part in parts for ref in part.rpc_sync().references()]
    optimizer = gradwire.DistributedOptimizer(torch.optim.Adam, parameters, lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        h = x
        for part in parts:
            h = part.rpc_sync().forward(h)
        loss = nn.functional.mse_loss(h, y)
        loss.backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    print(f"learning rate {optimizer.param_groups[0]['lr']:g} after {STEPS} steps")
    return losses, [weight for part in parts for weight in part.rpc_sync().weights()]


def main():
    losses, weights = over_workers()
    local_losses, local_weights = in_one_process()
    same = all(torch.equal(a, b) for a, b in zip(weights, local_weights, strict=True))
    print(
        f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last; in one process the same: {same}"
    )
    assert losses == local_losses
    assert same
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
