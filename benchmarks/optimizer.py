"""How long does a step of DistributedOptimizer take for 1, 10 and 100 parameters?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import perf_counter

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row


def make(n: int) -> list:
    """Make so many parameters on this worker and return references to them."""
    return [here().RRef(torch.ones(64, requires_grad=True)) for _ in range(n)]


def total(parameters: list) -> torch.Tensor:
    """The sum of all parameters, on the worker that owns them."""
    return torch.stack([parameter.local_value() for parameter in parameters]).sum()


def steps(n: int, seconds: float) -> list[float]:
    """Only the step is timed, not the backward before it."""
    api = here()
    parameters = api.rpc_sync("w1", make, args=(n,))
    optimizer = api.optimizer(torch.optim.SGD, parameters, lr=0.01)
    samples: list[float] = []
    while not samples or sum(samples) < seconds:
        with api.context() as context:
            api.backward(context, [api.rpc_sync("w1", total, args=(parameters,))])
            begin = perf_counter()
            optimizer.step(context)
            samples.append(perf_counter() - begin)
    return samples


def rows(run: Run) -> Iterator[Row]:
    """1, 10 and 100 parameters, all on one worker."""
    for n in run.sizes(1, 10, 100):
        samples = run.compare(run.worlds(2), steps, n, run.seconds / 2)
        yield row("optimizer", f"SGD step, {n} remote parameters", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "optimizer", *sys.argv[1:]])
