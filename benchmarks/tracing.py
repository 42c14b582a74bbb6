"""What does a trace cost the program that is traced? gradwire alone."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

import gradwire
from benchmarks.api import GRADWIRE
from benchmarks.measure import Row, Run, row, timed
from benchmarks.noop import nothing

_CHUNK_SECONDS = 0.1


def work(x: torch.Tensor) -> torch.Tensor:
    """A function that computes for five milliseconds."""
    until = time.perf_counter() + 0.005
    while time.perf_counter() < until:
        y = x.sin()
    return y


def no_op() -> None:
    """The smallest call."""
    gradwire.rpc_sync("w1", nothing)


def forward_and_backward() -> None:
    """Over one call."""
    x = torch.ones(16, requires_grad=True)
    gradwire.rpc_sync("w1", torch.sin, args=(x,)).sum().backward()


def step_of_five_milliseconds() -> None:
    """Forward and backward over one call that computes."""
    x = torch.ones(16, requires_grad=True)
    gradwire.rpc_sync("w1", work, args=(x,)).sum().backward()


STEPS = (no_op, forward_and_backward, step_of_five_milliseconds)


def times_untraced(step: Callable[[], None], seconds: float) -> list[float]:
    """How many times as long a step takes inside of a trace, in turns with steps outside."""
    found, end = [], time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        chunk = min(seconds, _CHUNK_SECONDS)
        before = timed(step, chunk)
        with gradwire.trace(show=False):
            inside = timed(step, chunk)
        after = timed(step, chunk)
        found.append(statistics.median(inside) / statistics.median(before + after))
    return found


def rows(run: Run) -> Iterator[Row]:
    """Of a call, of a small step, and of one that computes."""
    (world,) = [world for world in run.worlds(2) if world.side == GRADWIRE]
    for step in STEPS:
        samples = run.compare([world], times_untraced, step, run.seconds)
        measure = f"{step.__name__.replace('_', ' ')} while it is traced"
        yield row("tracing", measure, samples, unit="times")


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "tracing", *sys.argv[1:]])
