"""Streams and actors: w0 reads samples that a generator on w1 makes as they are needed.

The generator scales its samples by a parameter of w0, and `loss.backward()` reaches it through each
item. It is never more than AHEAD items ahead of the loop, and ends when the loop is left. An actor
on w1, which is found by its name, keeps the losses in the order in which they were sent.
"""

import torch

import gradwire

AHEAD, STEPS, RATE = 8, 40, 0.2
torch.set_default_dtype(torch.float64)

made = []


def samples(scale):
    """Endless: the reader decides when it ends."""
    try:
        while True:
            made.append(len(made))
            yield scale * torch.tensor([1.0, 2.0, 3.0])
    finally:
        made.append("ended")


class Losses:
    """An actor: its methods run one at a time, so it needs no lock."""

    def __init__(self):
        self.values = []

    def add(self, loss):
        self.values.append(loss)

    def all(self):
        return self.values


async def describe(keeper):
    """Runs on the event loop of its worker, and awaits a call of its own."""
    losses = await keeper.all()
    return f"{len(losses)} losses, the first is {losses[0]:.4f}"


def what_was_made():
    return made


def train():
    scale = torch.ones(3, requires_grad=True)
    target = torch.tensor([3.0, 2.0, 1.0])
    losses = gradwire.lookup("losses")
    for step, sample in enumerate(gradwire.stream("w1", samples, args=(scale,), ahead=AHEAD)):
        loss = (sample - target).square().mean()
        loss.backward()
        losses.add(loss.item())
        if step + 1 == STEPS:
            break
    return losses.rpc_sync().all(), scale.grad


def main():
    keeper = gradwire.actor("w1", Losses, name="losses")
    losses, gradient = train()
    described = gradwire.rpc_sync("w1", describe, args=(keeper,))
    with gradwire.stream("w1", samples, args=(torch.ones(3),)) as stream:
        first = next(iter(stream))
    made = gradwire.rpc_sync("w1", what_was_made)

    # All samples were made with the same scale, so their gradients add up to a multiple of one.
    weights, target = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])
    expected = STEPS * 2 / 3 * (weights - target) * weights
    torch.testing.assert_close(gradient, expected)
    assert losses == [losses[0]] * STEPS
    assert torch.equal(first, weights)
    assert made.count("ended") >= 1
    assert len(made) <= STEPS + AHEAD + 8
    assert described == f"{STEPS} losses, the first is {losses[0]:.4f}"
    print(f"{keeper.owner_name()} has kept {described}")
    print(f"{STEPS} items of a stream, one gradient: {gradient.tolist()}")


if __name__ == "__main__":
    gradwire.run(main, world_size=2)
