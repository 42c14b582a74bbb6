"""How long do forward and backward take over a chain of calls?"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed


def forward_and_backward(hops: int, in_context: bool, seconds: float) -> list[float]:
    """Forward through a chain of calls, then backward."""
    api, x = here(), torch.ones(16, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(hops):
            y = api.rpc_sync("w1", torch.sin, args=(y,))
        return y.sum()

    def step() -> None:
        with api.context() as context:
            api.backward(context, [forward()])
            assert x in api.get_gradients(context)

    def plain_step() -> None:
        forward().backward()
        assert x.grad is not None
        x.grad = None

    return timed(step if in_context or api.needs_context else plain_step, seconds)


def rows(run: Run) -> Iterator[Row]:
    """1, 4 and 10 calls, each there and back; torch needs a context for all of them."""
    for hops in run.sizes(1, 4, 10):
        for in_context in (True, False):
            worlds, more = run.worlds(2), "" if in_context else ", no context"
            samples = run.compare(worlds, forward_and_backward, hops, in_context, run.seconds)
            yield row("hops", f"forward and backward over {hops}{more}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "hops", *sys.argv[1:]])
