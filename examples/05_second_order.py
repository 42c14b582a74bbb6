"""Second derivatives: a gradient penalty on a critic that is split over two other workers.

The penalty pushes the norm of the critic's gradient at x to 1. This gradient is computed with
`torch.autograd.grad(..., create_graph=True)`. The backward of the penalty differentiates through
it, across the workers, and reaches the critic's weights.
"""

import torch
from torch import nn

import gradwire

torch.set_default_dtype(torch.float64)


class Half(nn.Module):
    """Half a critic."""

    def __init__(self, seed, inputs, outputs):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.tanh(self.linear(x))

    def gradients(self):
        return [parameter.grad for parameter in self.parameters()]


LOWER, UPPER = (1, 4, 8), (2, 8, 1)  # seed, inputs, outputs


def penalty_of(critic, x):
    """Plain torch; it does not know that the critic is remote."""
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def main():
    lower = gradwire.remote("w1", Half, args=LOWER)
    upper = gradwire.remote("w2", Half, args=UPPER)

    def remote_critic(x):
        return upper.rpc_sync().forward(lower.rpc_sync().forward(x))

    x = torch.randn(32, 4, requires_grad=True)
    penalty = penalty_of(remote_critic, x)
    penalty.backward()
    found = [grad for half in (lower, upper) for grad in half.rpc_sync().gradients()]

    critic = nn.Sequential(Half(*LOWER), Half(*UPPER))  # the same, in one process
    local_x = x.detach().clone().requires_grad_()
    expected = penalty_of(critic, local_x)
    expected.backward()
    wanted = [parameter.grad for parameter in critic.parameters()]

    print(f"penalty {penalty.item():.9f}, in one process {expected.item():.9f}")
    torch.testing.assert_close(penalty, expected)
    names = [name for name, _ in critic.named_parameters()]
    for name, a, b in zip(["x", *names], [x.grad, *found], [local_x.grad, *wanted], strict=True):
        print(f"{name:15} |gradient| {a.norm():.9f}  largest difference {(a - b).abs().max():.1e}")
        torch.testing.assert_close(a, b)


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
