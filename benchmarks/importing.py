"""How long does the import take?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.api import TORCH
from benchmarks.measure import Row, Run, Samples, row
from benchmarks.sides import SECONDS

IMPORTS = {
    TORCH: "import torch.distributed.rpc, torch.distributed.autograd, torch.distributed.optim",
    "gradwire": "import gradwire",
}
PROGRAM = """
from time import perf_counter
begin = perf_counter()
import torch
middle = perf_counter()
{statement}
print(perf_counter() - begin, perf_counter() - middle)
"""


def seconds_of(side: str) -> tuple[float, float]:
    """Seconds of the whole import, and without that of torch, in a fresh interpreter."""
    program = PROGRAM.format(statement=IMPORTS[side])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    whole, rest = map(float, done.stdout.split())
    return whole, rest


def rows(run: Run) -> Iterator[Row]:
    """The import with torch, and after torch."""
    samples: list[Samples] = [{side: [] for side in run.sides} for _ in range(2)]
    for n in range(run.rounds if run.tiny else run.rounds + 1):
        for side in run.sides:
            found = seconds_of(side)
            if n > 0 or run.tiny:  # the first reads from disk
                samples[0][side].append([found[0]])
                samples[1][side].append([found[1]])
    yield row("importing", "with torch", samples[0])
    yield row("importing", "after torch", samples[1])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "importing", *sys.argv[1:]])
