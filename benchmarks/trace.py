"""When does each stage of a pipeline work, and when does it send its gradients?

    python -m benchmarks.trace

Draws one step of the pipeline of pipeline.py, over four workers in this process: a column is 5 ms,
a digit is the micro-batch that a stage works on. Below the backward of a stage, a bar is a message
with gradients that the stage sends; the first stage sends none.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

import gradwire
from benchmarks.pipeline import BACKWARD, FORWARD, MICRO_BATCHES
from gradwire.testing import cluster

STAGES, COLUMN = 3, 0.005


class Span(NamedTuple):
    """A stage worked on a micro-batch."""

    stage: int
    kind: str
    batch: int
    begin: float
    end: float


SPANS: list[Span] = []
LEFT: list[tuple[str, float]] = []
"""the workers that sent gradients, and when"""


class Work(torch.autograd.Function):
    """As in pipeline.py, and recorded."""

    @staticmethod
    def forward(ctx, x, stage, batch):
        """Takes `FORWARD` seconds."""
        ctx.stage, ctx.batch = stage, batch
        stage.work("forward", batch, FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Takes `BACKWARD` seconds."""
        ctx.stage.work("backward", ctx.batch, BACKWARD)
        return gradient, None, None


@gradwire.expose
class Stage(nn.Module):
    """A part of the model, which takes one micro-batch at a time."""

    def __init__(self, n):
        super().__init__()
        self.n, self.turn = n, threading.Lock()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x, batch):
        """Fetch one micro-batch and run it."""
        return Work.apply(x.to_here() * self.weight, self, batch)

    def work(self, kind, batch, seconds):
        """Be busy."""
        with self.turn:
            begin = time.monotonic()
            time.sleep(seconds)
            SPANS.append(Span(self.n, kind, batch, begin, time.monotonic()))


def step(model: list) -> None:
    """Forward of all micro-batches, then backward."""
    with gradwire.context() as context:
        outputs = []
        for batch, x in enumerate(torch.ones(MICRO_BATCHES * 16, 64).chunk(MICRO_BATCHES)):
            h = gradwire.RRef(x)
            for stage in model[:-1]:
                h = stage.remote().forward(h, batch)
            outputs.append(model[-1].rpc_async().forward(h, batch))
        gradwire.backward(context, [torch.cat([y.wait() for y in outputs]).sum()])


def traced() -> None:
    """Two steps, of which the second is recorded."""
    with cluster(STAGES + 1) as workers, ExitStack() as around:
        model = workers[0].run(
            lambda: [gradwire.remote(f"w{n + 1}", Stage, args=(n + 1,)) for n in range(STAGES)]
        )
        workers[0].run(step, model)
        recorded = {
            each.name: around.enter_context(each.worker.events.recording()) for each in workers
        }
        SPANS.clear()
        workers[0].run(step, model)
        LEFT[:] = [
            (name, began)
            for name, kept in recorded.items()
            for _, what, began, *_ in kept()
            if what == "gradients"
        ]


def drawn(stage: int, kind: str, first: float) -> str:
    """One row of columns."""
    row: dict[int, str] = {}
    for span in SPANS:
        if (span.stage, span.kind) == (stage, kind):
            columns = range(
                round((span.begin - first) / COLUMN), round((span.end - first) / COLUMN)
            )
            row |= dict.fromkeys(columns, str(span.batch))
    return "".join(row.get(column, ".") for column in range(max(row) + 1))


def bars(stage: int, first: float) -> str:
    """The row that shows when a stage sends gradients."""
    columns = {int((when - first) / COLUMN) for who, when in LEFT if who == f"w{stage}"}
    return "".join(
        "|" if column in columns else " " for column in range(max(columns, default=-1) + 1)
    )


def main() -> None:
    """Run and draw one step."""
    traced()
    first = min(span.begin for span in SPANS)
    for stage in range(1, STAGES + 1):
        print(f"w{stage} forward   {drawn(stage, 'forward', first)}")
    for stage in range(STAGES, 0, -1):
        print(f"w{stage} backward  {drawn(stage, 'backward', first)}")
        if stage > 1:
            print(f"   gradients {bars(stage, first)}")
    alone = sum(span.end - span.begin for span in SPANS)
    took = max(span.end for span in SPANS) - first
    print(f"{1000 * alone:.0f} ms of work in {1000 * took:.0f} ms")


if __name__ == "__main__":
    main()
