"""How long does a tensor of 1 KiB to 256 MiB take there and back, on one machine and over TCP?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks import peers
from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB, 256 * MIB)
COPIED = 64 * MIB


def same(x: torch.Tensor) -> torch.Tensor:
    """The called function."""
    return x


def echo(size: int, seconds: float) -> list[float]:
    """`rpc_sync` of a function that returns the tensor of `size` bytes it was given."""
    rpc_sync, x = here().rpc_sync, torch.ones(size // 4)
    return timed(lambda: rpc_sync("w1", same, args=(x,)), seconds)


def copies(size: int, seconds: float) -> list[float]:
    """For comparison: copy so many bytes from one tensor to another twice, without a call."""
    x, y = torch.ones(size // 4), torch.empty(size // 4)
    return timed(lambda: y.copy_(x) is x.copy_(y), seconds)


def spoken(size: int) -> str:
    """1 KiB, 256 MiB."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def rows(run: Run) -> Iterator[Row]:
    """The default transport of each side on one machine, then TCP for both."""
    for road, tcp in (("one machine", False), ("TCP", True)):
        worlds = run.worlds(2, tcp=tcp)
        for size in run.sizes(*SIZES):
            samples = run.compare(worlds, echo, size, run.seconds)
            if not tcp:
                samples |= peers.echoes(run, size)
            yield row("echo", f"{spoken(size)}, {road}", samples)
        if not tcp and not run.tiny:
            samples = run.compare(worlds, copies, COPIED, run.seconds)
            yield row("echo", f"two plain copies of {spoken(COPIED)}, no call", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "echo", *sys.argv[1:]])
