"""How long does backward take through a large local graph behind one call?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import perf_counter

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row

NODES = 20_000


def backward(nodes: int) -> list[float]:
    """A chain of additions, then a call whose backward leads into it. Only backward is timed."""
    api, x = here(), torch.ones(4, requires_grad=True)
    with api.context() as context:
        y = x
        for _ in range(nodes):
            y = y + 1
        loss = api.rpc_sync("w1", torch.sin, args=(y,)).sum()
        begin = perf_counter()
        api.backward(context, [loss])
        return [perf_counter() - begin]


def rows(run: Run) -> Iterator[Row]:
    """One Send with the whole graph behind it."""
    (nodes,) = run.sizes(NODES, tiny=100)
    samples = run.compare(run.worlds(2), backward, nodes)
    yield row("big_graph", f"backward through {nodes} local nodes behind one send", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "big_graph", *sys.argv[1:]])
