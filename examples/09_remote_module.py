"""RemoteModule: a model with layers on three workers, used like a local model.

The first and the last layer of the model are on other workers, the middle one is local. It is
trained and saved like any model. Weights leave their workers only in `state_dict`.
"""

import torch
from torch import nn

import gradwire

STEPS, RATE = 30, 0.5
torch.set_default_dtype(torch.float64)


class Spread(nn.Module):
    """An embedding on w1, a layer here, a layer on w2."""

    def __init__(self):
        super().__init__()
        self.words = gradwire.RemoteModule("w1", nn.Embedding, (16, 8))
        self.middle = nn.Linear(8, 8)
        self.last = gradwire.RemoteModule("w2/cpu", nn.Linear, (8, 1), {"bias": False})

    def forward(self, tokens):
        return self.last(torch.tanh(self.middle(self.words(tokens))))


class Whole(nn.Module):
    """The same layers in one process."""

    def __init__(self):
        super().__init__()
        self.words, self.middle = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, tokens):
        return self.last(torch.tanh(self.middle(self.words(tokens))))


def descend(module):
    """One step of gradient descent; runs on the worker of the module."""
    if isinstance(module, gradwire.RRef):
        module = module.local_value()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * parameter.grad
    module.zero_grad()


def train(model, update, tokens, wanted):
    losses = []
    for _ in range(STEPS):
        loss = (model(tokens) - wanted).square().mean()
        loss.backward()
        update(model)
        losses.append(loss.item())
    return losses


def update_spread(model):
    descend(model.middle)
    for part in (model.words, model.last):
        gradwire.rpc_sync(part.on, descend, args=(part.get_module_rref(),))


def main():
    torch.manual_seed(0)
    whole, spread = Whole(), Spread()
    spread.load_state_dict(whole.state_dict())  # each worker gets its part
    print(spread)

    tokens = torch.arange(16)
    wanted = (tokens % 3).double()[:, None]
    losses = train(spread, update_spread, tokens, wanted)
    expected = train(whole, descend, tokens, wanted)
    print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, in one process {expected[-1]:.6f}")
    assert losses[-1] < losses[0] / 5
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))

    state = spread.state_dict()  # and all parts come back
    print("its state:", ", ".join(state))
    assert list(state) == list(whole.state_dict())
    torch.testing.assert_close(dict(state), dict(whole.state_dict()))


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
