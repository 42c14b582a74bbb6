"""How long until all workers have joined?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.measure import Row, Run, Samples, row


def rows(run: Run) -> Iterator[Row]:
    """The start of 2, 8 and 16 workers; of it, the time from all imported to all joined."""
    for size in run.sizes(2, 8, 16, tiny=1):
        whole: Samples = {side: [] for side in run.sides}
        joining: Samples = {side: [] for side in run.sides}
        for _ in range(min(run.rounds, 5)):
            for side in run.sides:
                with run.fresh(side, size) as world:
                    whole[side].append([world.starting + world.joining])
                    joining[side].append([world.joining])
        yield row("startup", f"{size} processes, begun to joined", whole)
        yield row("startup", f"of it, {size} workers joining", joining)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "startup", *sys.argv[1:]])
