"""The tensors in a value, and how deep the graph behind them is."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradwire.autograd.graph.walk import origin_of


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value, inside plain containers too."""
    match value:
        case Tensor():
            yield value
        case list() | tuple():
            for item in value:
                yield from tensors_in(item)
        case dict():
            yield from tensors_in(list(value.values()))
        case _:
            pass


def depth_of(value: object) -> int:
    """The depth of the tensors in a value, above which its next thread must make nodes."""
    return origin_of(tensor.grad_fn for tensor in tensors_in(value)).depth
