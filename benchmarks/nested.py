"""How long does a call take whose arguments are nested containers?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.api import here
from benchmarks.measure import Row, Run, row, timed


def count(_: Any) -> int:
    """The called function."""
    return 0


def leaves(number: int) -> dict[str, list[dict[str, Any]]]:
    """Dicts of lists of dicts, with so many numbers, strings, floats and flags in them."""
    each = {"id": 1, "name": "sample", "weight": 0.5, "is_valid": True, "none": None}
    return {f"part{n}": [dict(each) for _ in range(5)] for n in range(max(1, number // 25))}


def batch(tensors: int) -> dict[str, Any]:
    """A batch of a data loader: tensors, and 20 strings."""
    found: dict[str, Any] = {f"field{n}": torch.ones(32, 16) for n in range(tensors)}
    return found | {"names": [f"sample {n}" for n in range(20)]}


def call_with_leaves(number: int, seconds: float) -> list[float]:
    """Containers only."""
    rpc_sync, argument = here().rpc_sync, leaves(number)
    return timed(lambda: rpc_sync("w1", count, args=(argument,)), seconds)


def call_with_batch(tensors: int, seconds: float) -> list[float]:
    """Tensors and strings in a dict."""
    rpc_sync, argument = here().rpc_sync, batch(tensors)
    return timed(lambda: rpc_sync("w1", count, args=(argument,)), seconds)


def rows(run: Run) -> Iterator[Row]:
    """1 000 and 100 leaves; a batch dict."""
    worlds = run.worlds(2)
    for number in run.sizes(100, 1000):
        samples = run.compare(worlds, call_with_leaves, number, run.seconds)
        yield row("nested", f"{number} leaves in dicts and lists", samples)
    samples = run.compare(worlds, call_with_batch, 8, run.seconds)
    yield row("nested", "a dict of 8 tensors and 20 strings", samples)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "nested", *sys.argv[1:]])
