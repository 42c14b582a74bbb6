"""How long does it take to leave a value on a worker, and to fetch it?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import perf_counter

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed


def value() -> int:
    """The called function."""
    return 1


def one(seconds: float) -> list[float]:
    """`remote(...).to_here()`."""
    remote = here().remote
    return timed(lambda: remote("w1", value).to_here(), seconds)


def many(count: int, fetched: bool) -> list[float]:
    """The time of each of so many references; those that are not fetched are kept until the end."""
    remote = here().remote
    begin = perf_counter()
    references = [remote("w1", value) for _ in range(count)]
    if fetched:
        for reference in references:
            reference.to_here()
    each = (perf_counter() - begin) / count
    here().rpc_sync("w1", value)  # all are made before the next round
    return [each]


def rows(run: Run) -> Iterator[Row]:
    """One at a time; many at once, then each fetched; many that nobody fetches."""
    worlds = run.worlds(2)
    yield row("references", "remote().to_here()", run.compare(worlds, one, run.seconds))
    for count, fetched in ((300, True), (1000, False)):
        count = 30 if run.tiny else count
        then = ", then to_here() of each" if fetched else ""
        samples = run.compare(worlds, many, count, fetched)
        yield row("references", f"each of {count} remote(){then}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "references", *sys.argv[1:]])
