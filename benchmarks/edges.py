"""Does an edge cost more if there are many?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from time import perf_counter

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row


def forward_and_backward(edges: int, in_context: bool) -> list[tuple[float, float]]:
    """Seconds for each edge, in forward and in backward. A call is two edges: there, and back."""
    api, x = here(), torch.ones(4, requires_grad=True)
    with api.context() if in_context or api.needs_context else nullcontext() as context:
        begin = perf_counter()
        outputs = [api.rpc_sync("w1", torch.sin, args=(x,)) for _ in range(edges // 2)]
        loss = torch.stack(outputs).sum()
        middle = perf_counter()
        loss.backward() if context is None else api.backward(context, [loss])
        end = perf_counter()
    return [((middle - begin) / edges, (end - middle) / edges)]


def rows(run: Run) -> Iterator[Row]:
    """The time per edge, with 100, 1 000 and 10 000 edges."""
    for edges in run.sizes(100, 1000, 10_000, tiny=10):
        for in_context, more in ((True, ""), (False, ", no context")):
            both = run.compare(run.worlds(2), forward_and_backward, edges, in_context)
            for n, way in enumerate(("forward", "backward")):
                samples = {
                    side: [[times[n] for times in found] for found in rounds]
                    for side, rounds in both.items()
                }
                yield row("edges", f"{way} for each of {edges}{more}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "edges", *sys.argv[1:]])
