"""How long do forward and backward take over a chain of calls?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed


def forward_and_backward(hops: int, seconds: float) -> list[float]:
    """Forward through a chain of calls, then backward."""
    api, x = here(), torch.ones(16, requires_grad=True)

    def step() -> None:
        with api.context() as context:
            y = x
            for _ in range(hops):
                y = api.rpc_sync("w1", torch.sin, args=(y,))
            api.backward(context, [y.sum()])
            assert x in api.get_gradients(context)

    return timed(step, seconds)


def rows(run: Run) -> Iterator[Row]:
    """1, 4 and 10 calls, each there and back."""
    for hops in run.sizes(1, 4, 10):
        samples = run.compare(run.worlds(2), forward_and_backward, hops, run.seconds)
        yield row("hops", f"forward and backward over {hops}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "hops", *sys.argv[1:]])
