"""How long does a CUDA tensor take there and back, and forward and backward through a call?

Two worker processes share one GPU. Without a GPU there are no rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed

MIB = 1 << 20
ECHOES = (4, MIB, 64 * MIB, 1024 * MIB)
CROSSINGS = (1024, 4 * MIB, 64 * MIB)


def same(x: torch.Tensor) -> torch.Tensor:
    """The called function."""
    return x


def echo(size: int, seconds: float) -> list[float]:
    """`rpc_sync` of a function that returns its tensor, until the device has it."""
    rpc_sync, x = here().rpc_sync, torch.ones(size // 4, device="cuda:0")

    def step() -> None:
        rpc_sync("w1", same, args=(x,))
        torch.cuda.synchronize()

    step()
    return timed(step, seconds)


def forward_and_backward(size: int, seconds: float) -> list[float]:
    """One call and its backward, until the device has the gradient."""
    api, x = here(), torch.ones(size // 4, device="cuda:0", requires_grad=True)

    def step() -> None:
        with api.context() as context:
            y = api.rpc_sync("w1", torch.neg, args=(x,))
            api.backward(context, [y.sum()])
            assert x in api.get_gradients(context)
        torch.cuda.synchronize()

    def plain_step() -> None:
        api.rpc_sync("w1", torch.neg, args=(x,)).sum().backward()
        assert x.grad is not None
        x.grad = None
        torch.cuda.synchronize()

    chosen = step if api.needs_context else plain_step
    chosen()
    return timed(chosen, seconds)


def spoken(size: int) -> str:
    """4 B, 1 MiB."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size} B"


def rows(run: Run) -> Iterator[Row]:
    """Both sides with a device map of the same device."""
    if not torch.cuda.is_available():
        return
    worlds = run.worlds(2)
    for size in run.sizes(*ECHOES):
        samples = run.compare(worlds, echo, size, run.seconds)
        yield row("cuda", f"echo of {spoken(size)}", samples)
    for size in run.sizes(*CROSSINGS):
        samples = run.compare(worlds, forward_and_backward, size, run.seconds)
        yield row("cuda", f"forward and backward, {spoken(size)}", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "cuda", *sys.argv[1:]])
