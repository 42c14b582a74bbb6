"""How well do three stages with eight micro-batches overlap?

A stage simulates an accelerator: it takes one micro-batch at a time, for a fixed time in forward
and another in backward, and uses no core meanwhile. So two cores are enough for three stages, and
the ideal time is known: (micro-batches + stages - 1) times the sum of the two.
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
    """The work of the accelerator: returns its input after a while."""

    @staticmethod
    def forward(ctx, x, turn):
        """Takes `FORWARD` seconds."""
        ctx.turn = turn
        with turn:
            time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Takes `BACKWARD` seconds."""
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
        """Fetch one micro-batch and run it."""
        return Work.apply(x.to_here() * self.weight, self.turn)

    def is_ready(self):
        """Always true; the answer shows that the stage exists."""
        return True


def gradients(context: int) -> int:
    """How many leaves of this worker have a gradient."""
    return len(here().get_gradients(context))


def forward_and_backward(model: list, batch: torch.Tensor, *, checks: bool = False) -> None:
    """Forward of all micro-batches, passed by reference, then backward."""
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
    """One step whose gradients are checked, then the timed steps.

    All stages are created before: torch.distributed.rpc loses the graph of calls on an object that
    is still being created.
    """
    model = [here().remote(f"w{n + 1}", Stage) for n in range(stages)]
    assert all(stage.rpc_sync().is_ready() for stage in model)
    batch = torch.ones(MICRO_BATCHES * 16, 64)
    forward_and_backward(model, batch, checks=True)
    return timed(lambda: forward_and_backward(model, batch), seconds)


def rows(run: Run) -> Iterator[Row]:
    """The time of a step, and the ratio of the ideal time to it."""
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
