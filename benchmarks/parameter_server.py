"""How long is one training step if the model lives on a server?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed


class Server:
    """The model. It lives on w1."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

    def parameters(self):
        """References to the parameters."""
        return [here().RRef(parameter) for parameter in self.model.parameters()]

    def forward(self, x):
        """The output, which the trainer differentiates."""
        return self.model(x)


def steps(in_context: bool, seconds: float) -> list[float]:
    """Forward on the server, loss here, backward, and a step of the optimizer there."""
    api, x = here(), torch.randn(64, 64)
    server = api.remote("w1", Server)
    parameters = server.rpc_sync().parameters()
    optimizer = api.optimizer(torch.optim.SGD, parameters, lr=0.01)

    def step() -> None:
        with api.context() as context:
            loss = server.rpc_sync().forward(x).square().mean()
            api.backward(context, [loss])
            optimizer.step(context)

    def plain_step() -> None:
        optimizer.zero_grad()
        server.rpc_sync().forward(x).square().mean().backward()
        optimizer.step()

    return timed(step if in_context or api.needs_context else plain_step, seconds)


def rows(run: Run) -> Iterator[Row]:
    """One trainer, one server."""
    for in_context, more in ((True, ""), (False, ", no context")):
        samples = run.compare(run.worlds(2), steps, in_context, run.seconds)
        yield row("parameter_server", f"forward, backward, step{more}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "parameter_server", *sys.argv[1:]])
