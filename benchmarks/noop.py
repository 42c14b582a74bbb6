"""How long does the smallest call take?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks import peers
from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed
from benchmarks.sides import busy_cores


def nothing() -> None:
    """The called function."""


def same(x: torch.Tensor) -> torch.Tensor:
    """The called function that takes a tensor."""
    return x


def call_nothing(seconds: float) -> list[float]:
    """`rpc_sync` of a function that takes nothing and returns nothing."""
    rpc_sync = here().rpc_sync
    return timed(lambda: rpc_sync("w1", nothing), seconds)


def call_with_tensor(seconds: float) -> list[float]:
    """`rpc_sync` of a function that returns the tensor it was given."""
    rpc_sync, x = here().rpc_sync, torch.ones(16)
    return timed(lambda: rpc_sync("w1", same, args=(x,)), seconds)


def call_operator(seconds: float) -> list[float]:
    """`rpc_sync` of one of torch's own operators."""
    rpc_sync, x = here().rpc_sync, torch.ones(16)
    return timed(lambda: rpc_sync("w1", torch.add, args=(x, x)), seconds)


def rows(run: Run) -> Iterator[Row]:
    """On a quiet machine, then while other processes keep all cores busy."""
    worlds = run.worlds(2)
    for measure, block in (
        ("no-op", call_nothing),
        ("16 floats there and back", call_with_tensor),
        ("torch.add of 16 floats", call_operator),
    ):
        samples = run.compare(worlds, block, run.seconds)
        if block is call_nothing:
            samples |= peers.calls(run)
        yield row("noop", measure, samples)
    with busy_cores():
        samples = run.compare(worlds, call_nothing, run.seconds)
    yield row("noop", "no-op, all cores busy with others", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "noop", *sys.argv[1:]])
