"""How many calls per second, with 64 in flight?"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from time import perf_counter

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row

IN_FLIGHT = 64


def nothing() -> None:
    """The called function."""


def calls_a_second(calls: int, with_tensor: bool) -> list[float]:
    """Wait for the oldest call, then make the next: 64 are always in flight."""
    rpc_async, x = here().rpc_async, torch.ones(16)
    target = (torch.neg, (x,)) if with_tensor else (nothing, ())
    waiting: deque = deque()
    begin = perf_counter()
    for _ in range(calls):
        if len(waiting) == IN_FLIGHT:
            waiting.popleft().wait()
        waiting.append(rpc_async("w1", target[0], args=target[1]))
    while waiting:
        waiting.popleft().wait()
    return [calls / (perf_counter() - begin)]


def rows(run: Run) -> Iterator[Row]:
    """Empty calls, and calls of an operator."""
    calls = 100 if run.tiny else int(4000 * run.seconds)
    for measure, with_tensor in (("no-op", False), ("torch.neg of 16 floats", True)):
        samples = run.compare(run.worlds(2), calls_a_second, calls, with_tensor)
        measure = f"{measure}, {IN_FLIGHT} in flight"
        yield row("inflight", measure, samples, "calls/s", more_is_better=True)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "inflight", *sys.argv[1:]])
