"""What does it cost that nobody else can read or change what travels? Of gradwire alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.api import GRADWIRE
from benchmarks.echo import KIB, MIB, echo, spoken
from benchmarks.measure import Row, Run, row

SIZES = (KIB, MIB, 64 * MIB)
ROADS = {
    "plain TCP": {"tcp": True},
    "plain TCP, checksums on tensors": {"tcp": True, "checksum": True},
    "TLS 1.3": {"tcp": True, "tls": True},
}
"""By name: how the world is made whose messages go that way."""


def rows(run: Run) -> Iterator[Row]:
    """The same echo on each road; torch.distributed.rpc has the first alone."""
    for road, settings in ROADS.items():
        with run.fresh(GRADWIRE, 2, **settings) as world:
            for size in run.sizes(*SIZES):
                samples = run.compare([world], echo, size, run.seconds)
                yield row("protected", f"{spoken(size)}, {road}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "protected", *sys.argv[1:]])
