"""How much memory does a worker take, and does it grow?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, Samples, row

STEPS = (1_000, 10_000)


def resident(field: str = "VmRSS") -> float:
    """MiB of this process, as the system counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


def steps(n: int) -> None:
    """Forward and backward over one call, so many times."""
    api, x = here(), torch.ones(16, requires_grad=True)
    for _ in range(n):
        with api.context() as context:
            api.backward(context, [api.rpc_sync("w1", torch.sin, args=(x,)).sum()])


def rows(run: Run) -> Iterator[Row]:
    """Resident memory of both workers of a new world after 10 steps, and after many more."""
    stops = (10, *run.sizes(*STEPS, tiny=20))
    samples: dict[int, Samples] = {stop: {} for stop in stops}
    for side in run.sides:
        with run.alone(side, 2) as world:
            done = 0
            for stop in stops:
                world.run(steps, stop - done)
                done = stop
                samples[stop][side] = [[world.run(resident, on=rank) for rank in range(2)]]
    for stop in stops:
        yield row("memory", f"resident, each of 2 workers after {stop} steps", samples[stop], "MiB")


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "memory", *sys.argv[1:]])
