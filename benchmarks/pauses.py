"""How long does the first call take after the caller has slept or computed for a while?"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from time import perf_counter

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row


def nothing() -> None:
    """The called function."""


def _at_work(seconds: float) -> None:
    until = perf_counter() + seconds
    while perf_counter() < until:
        pass


def after_pauses(pause: float, asleep: bool, with_graph: bool, seconds: float) -> list[float]:
    """Only what follows a pause is timed."""
    api, rest = here(), time.sleep if asleep else _at_work
    x = torch.ones(16, requires_grad=True)

    def forward_and_backward() -> None:
        with api.context() as context:
            api.backward(context, [api.rpc_sync("w1", torch.sin, args=(x,)).sum()])

    step: Callable[[], object] = (
        forward_and_backward if with_graph else lambda: api.rpc_sync("w1", nothing)
    )
    samples, until = [], perf_counter() + max(seconds, 10 * pause)
    while not samples or perf_counter() < until:
        rest(pause)
        begin = perf_counter()
        step()
        samples.append(perf_counter() - begin)
    return samples


def rows(run: Run) -> Iterator[Row]:
    """A no-op, and forward and backward over one call, after pauses of 1 to 100 ms."""
    worlds = run.worlds(2)
    for with_graph, what in ((False, "no-op"), (True, "forward and backward over 1")):
        for pause in run.sizes(1, 5, 20, 100):
            for asleep in (True, False):
                settings = (pause / 1000, asleep, with_graph, run.seconds)
                samples = run.compare(worlds, after_pauses, *settings)
                state = "asleep" if asleep else "at work"
                yield row("pauses", f"{what}, after {pause} ms {state}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "pauses", *sys.argv[1:]])
