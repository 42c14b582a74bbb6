"""docs/graph.svg: what `gradwire.graph` draws of a small pipeline."""

from __future__ import annotations

import torch
from torch import nn

import gradwire
from gradwire.testing import cluster

MICRO_BATCHES, WIDTH = 2, 256


class Stage(nn.Module):
    """A part of a model, on a worker of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )

    def forward(self, x: gradwire.RRef[torch.Tensor]) -> torch.Tensor:
        """Of one micro-batch, which is fetched from where it was made."""
        y: torch.Tensor = self.layers(x.to_here())
        return y


def page() -> str:
    """The whole picture."""
    with cluster(3, expose=[Stage]) as workers:
        return workers[0].run(_picture)


def _picture() -> str:
    embedding = nn.Linear(WIDTH, WIDTH)
    first, second = (gradwire.remote(worker, Stage) for worker in ("w1", "w2"))

    def output() -> torch.Tensor:
        h = first.remote().forward(gradwire.RRef(embedding(torch.ones(64, WIDTH))))
        y: torch.Tensor = second.rpc_sync().forward(h)
        return y

    outputs = [output() for _ in range(MICRO_BATCHES)]
    unused = output()
    drawn = gradwire.graph(torch.cat(outputs).square().mean())
    del unused
    return drawn.svg()
