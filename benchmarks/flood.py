"""Does a slow receiver's memory stay under a limit while a caller floods it?

The caller sends 1 MiB with each `rpc_async` as fast as it is let; the receiver takes 20 ms for
each. A side that queues without end is stopped at `MOST_WAITING` calls not answered.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, Samples, row
from benchmarks.memory import resident

SECONDS = 30.0
SIZE = 1 << 20
PAUSE = 0.02
MOST_WAITING = 2048
LIMIT_MIB = 512
"""How much the receiver may grow."""


def slowly(x: torch.Tensor) -> int:
    """What is called."""
    time.sleep(PAUSE)
    return x.numel()


def flood(seconds: float) -> tuple[int, int]:
    """How many calls were made, and the most that were under way."""
    rpc_async, x = here().rpc_async, torch.ones(SIZE // 4)
    waiting: deque = deque()
    made = most = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        while waiting and waiting[0].done():
            waiting.popleft()
        if len(waiting) >= MOST_WAITING:
            waiting.popleft().wait()
        waiting.append(rpc_async("w1", slowly, args=(x,), timeout=10 * SECONDS))
        made += 1
        most = max(most, len(waiting))
    while waiting:
        waiting.popleft().wait()
    return made, most


def rows(run: Run) -> Iterator[Row]:
    """By how much each end has grown at its highest."""
    seconds = 0.02 if run.tiny else min(SECONDS, 60 * run.seconds)
    grown: list[Samples] = [{}, {}]
    said = []
    for side in run.sides:
        with run.alone(side, 2) as world:
            world.run(flood, 0.0)
            before = [world.run(resident, on=rank) for rank in range(2)]
            made, most = world.run(flood, seconds)
            for rank, samples in enumerate(grown):
                samples[side] = [[world.run(resident, "VmHWM", on=rank) - before[rank]]]
        held = "under" if grown[1][side][0][0] < LIMIT_MIB else "over"
        said.append(f"{side} {made} calls, at most {most} under way, {held} {LIMIT_MIB} MiB")
    what = f"of {SIZE >> 20} MiB calls for {seconds:g} s"
    yield row("flood", f"receiver grows by, {what}", grown[1], "MiB", note="; ".join(said))
    yield row("flood", "the caller by", grown[0], "MiB")


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "flood", *sys.argv[1:]])
