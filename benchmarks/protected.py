"""What do checksums on tensors and TLS cost? gradwire alone."""

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
"""The settings of the world for each kind of protection."""


def rows(run: Run) -> Iterator[Row]:
    """The same echo with each protection; torch.distributed.rpc has only plain TCP."""
    for road, settings in ROADS.items():
        with run.fresh(GRADWIRE, 2, **settings) as world:
            for size in run.sizes(*SIZES):
                samples = run.compare([world], echo, size, run.seconds)
                yield row("protected", f"{spoken(size)}, {road}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "protected", *sys.argv[1:]])
