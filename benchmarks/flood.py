"""Does a slow receiver's memory stay under a limit while a caller floods it?

The caller sends 1 MiB with each `rpc_async` as fast as it can; the receiver serves one call at a
time, in 20 ms each. A side that queues without limit is stopped at `MOST_WAITING` unanswered calls.
Shared memory that no process has mapped belongs to none, so that of the machine is measured too.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, Samples, row
from benchmarks.memory import resident

SECONDS = 30.0
SIZE = 1 << 20
PAUSE = 0.02
MOST_WAITING = 1024
LIMIT_MIB = 512
"""The limit on the growth of the receiver and of shared memory."""

_TURN = threading.Lock()


def slowly(x: torch.Tensor, pause: float) -> int:
    """The called function."""
    with _TURN:
        time.sleep(pause)
    return x.numel()


def flood(seconds: float, pause: float) -> tuple[int, int, float]:
    """The number of calls, the most in flight, and the MiB of shared memory then."""
    rpc_async, x = here().rpc_async, torch.ones(SIZE // 4)
    waiting: deque = deque()
    made = most = 0
    before = shared = shared_memory()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        while waiting and waiting[0].done():
            waiting.popleft()
        if len(waiting) >= MOST_WAITING:
            waiting.popleft().wait()
        waiting.append(rpc_async("w1", slowly, args=(x, pause), timeout=10 * SECONDS))
        made += 1
        most = max(most, len(waiting))
        shared = max(shared, shared_memory())
    while waiting:
        waiting.popleft().wait()
    return made, most, shared - before


def shared_memory() -> float:
    """MiB of shared memory on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / 1024
    return 0.0


def rows(run: Run) -> Iterator[Row]:
    """The largest growth of each end."""
    seconds, pause = (0.02, 0.001) if run.tiny else (min(SECONDS, 60 * run.seconds), PAUSE)
    callers: Samples = {}
    receivers: Samples = {}
    machines: Samples = {}
    said = []
    for side in run.sides:
        with run.alone(side, 2) as world:
            before = [world.run(resident, on=rank) for rank in range(2)]
            made, most, shared = world.run(flood, seconds, pause)
            after = [world.run(resident, "VmHWM", on=rank) for rank in range(2)]
        grown = [high - low for high, low in zip(after, before, strict=True)]
        callers[side], receivers[side], machines[side] = [[grown[0]]], [[grown[1]]], [[shared]]
        held = "under" if max(grown[1], shared) < LIMIT_MIB else "over"
        said.append(f"{side} {made} calls, at most {most} under way, {held} {LIMIT_MIB} MiB")
    measure = f"receiver grows by, in {seconds:g} s"
    yield row("flood", measure, receivers, "MiB", note="; ".join(said))
    yield row("flood", "caller grows by", callers, "MiB")
    yield row("flood", "shared memory grows by", machines, "MiB")


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "flood", *sys.argv[1:]])
