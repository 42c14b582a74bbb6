"""How well do three stages with eight micro-batches overlap?

A stage stands for an accelerator: it takes one micro-batch at a time, for a known time in forward
and another in backward, and needs no core meanwhile. So two cores are enough for three stages, and
the ideal is known: (micro-batches + stages - 1) times the two.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed

MICRO_BATCHES = 8
FORWARD, BACKWARD = 0.005, 0.010


class Work(torch.autograd.Function):
    """What the accelerator does: the same numbers, later."""

    @staticmethod
    def forward(ctx, x, turn):
        """For `FORWARD` seconds."""
        ctx.turn = turn
        with turn:
            time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """For `BACKWARD` seconds."""
        with ctx.turn:
            time.sleep(BACKWARD)
        return gradient, None


class Stage(nn.Module):
    """A part of the model, on one worker."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.turn = threading.Lock()

    def forward(self, x):
        """One micro-batch, fetched from where it is."""
        return Work.apply(x.to_here() * self.weight, self.turn)

    def is_ready(self):
        """It is, if it can say so."""
        return True


def gradients(context: int) -> int:
    """How many leaves of this worker have a gradient."""
    return len(here().get_gradients(context))


def forward_and_backward(model: list, batch: torch.Tensor, *, checks: bool = False) -> None:
    """Forward of all micro-batches, then backward; the caller hands out references."""
    api = here()
    with api.context() as context:
        outputs = []
        for x in batch.chunk(MICRO_BATCHES):
            h = api.RRef(x)
            for stage in model[:-1]:
                h = stage.remote().forward(h)
            outputs.append(model[-1].rpc_async().forward(h))
        api.backward(context, [torch.cat([y.wait() for y in outputs]).sum()])
        for n in range(len(model) if checks else 0):
            found = api.rpc_sync(f"w{n + 1}", gradients, args=(context,))
            assert found == 1, f"stage {n} has {found} gradients"


def steps(stages: int, seconds: float) -> list[float]:
    """A step whose gradients are looked at, then those that are timed.

    All stages are there before: torch.distributed.rpc loses the graph of calls on an object that is
    still being made.
    """
    model = [here().remote(f"w{n + 1}", Stage) for n in range(stages)]
    assert all(stage.rpc_sync().is_ready() for stage in model)
    batch = torch.ones(MICRO_BATCHES * 16, 64)
    forward_and_backward(model, batch, checks=True)
    return timed(lambda: forward_and_backward(model, batch), seconds)


def rows(run: Run) -> Iterator[Row]:
    """Time of a step; and the ideal time, as a share of it."""
    (stages,) = run.sizes(3, tiny=1)
    ideal = (MICRO_BATCHES + stages - 1) * (FORWARD + BACKWARD)
    samples = run.compare(run.worlds(stages + 1), steps, stages, run.seconds)
    yield row("pipeline", f"{stages} stages, {MICRO_BATCHES} micro-batches", samples)
    shares = {
        side: [[100 * ideal / time for time in times] for times in rounds]
        for side, rounds in samples.items()
    }
    yield row("pipeline", "share of the ideal overlap", shares, "%", more_is_better=True)
    run.keep(2)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "pipeline", *sys.argv[1:]])
