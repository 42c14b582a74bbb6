"""How long do forward and backward take when one caller calls many workers at once?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed


def forward_and_backward(workers: int, seconds: float) -> list[float]:
    """All workers get the same tensor, and their results are added."""
    api, x = here(), torch.ones(64, 64, requires_grad=True)

    def step() -> None:
        with api.context() as context:
            calls = [api.rpc_async(f"w{n + 1}", torch.matmul, args=(x, x)) for n in range(workers)]
            api.backward(context, [torch.stack([call.wait() for call in calls]).sum()])

    return timed(step, seconds)


def rows(run: Run) -> Iterator[Row]:
    """1, 2, 4 and 8 workers beside the caller."""
    for workers in run.sizes(1, 2, 4, 8):
        worlds = run.worlds(workers + 1)
        samples = run.compare(worlds, forward_and_backward, workers, run.seconds)
        yield row("fan_out", f"forward and backward, {workers} workers", samples)
        run.keep(2)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "fan_out", *sys.argv[1:]])
