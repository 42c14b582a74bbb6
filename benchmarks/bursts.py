"""How many calls per second, if all are made before the first is waited for, or from threads?"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from time import perf_counter

from benchmarks.api import here
from benchmarks.measure import Row, Run, row

THREADS = 8


def nothing() -> None:
    """The called function."""


def all_at_once(calls: int) -> list[float]:
    """Make all calls, then wait for each, as a list comprehension does."""
    rpc_async = here().rpc_async
    begin = perf_counter()
    for made in [rpc_async("w1", nothing) for _ in range(calls)]:
        made.wait()
    return [calls / (perf_counter() - begin)]


def from_threads(calls: int) -> list[float]:
    """`THREADS` threads call at the same time, one call after another in each."""
    rpc_sync, gate = here().rpc_sync, threading.Barrier(THREADS + 1)

    def work() -> None:
        gate.wait()
        for _ in range(calls // THREADS):
            rpc_sync("w1", nothing)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = perf_counter()
    for thread in threads:
        thread.join()
    return [calls / (perf_counter() - begin)]


def rows(run: Run) -> Iterator[Row]:
    """Empty calls: one burst, then a fixed number from each thread."""
    burst = 100 if run.tiny else 2000
    calls = 10 * THREADS if run.tiny else THREADS * int(500 * run.seconds)
    worlds = run.worlds(2)
    for measure, block, count in (
        (f"{burst} rpc_async, then wait for each", all_at_once, burst),
        (f"rpc_sync from {THREADS} threads", from_threads, calls),
    ):
        samples = run.compare(worlds, block, count)
        yield row("bursts", measure, samples, "calls/s", more_is_better=True)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "bursts", *sys.argv[1:]])
