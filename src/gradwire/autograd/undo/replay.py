"""Sums of gradients with one part left out, as if that part had never been added.

Floating-point sums depend on their order, so a part is never subtracted: what was there before it
is kept, and what others added after it is added again, in the same order.

Pure but for the tensors it is given: no threads, no hooks, no `.grad`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

import torch

Gradient = torch.Tensor | None


class Part(NamedTuple):
    """What one engine run has added to a leaf."""

    run: int
    gradient: torch.Tensor


def copy_of(gradient: Gradient) -> Gradient:
    """Its value now, without a graph."""
    return None if gradient is None else gradient.detach().clone()


def version_of(gradient: Gradient) -> int:
    """How often it was written to."""
    return 0 if gradient is None else gradient._version


def total(first: Gradient, parts: Iterable[Part]) -> Gradient:
    """A gradient that is nobody else's: `first`, and then each of the parts, as torch adds them."""
    result = copy_of(first)
    for part in parts:
        result = part.gradient.clone() if result is None else _sum(result, part.gradient)
    return result


def folded(
    first: Gradient, parts: tuple[Part, ...], unfinished: Container[int]
) -> tuple[Gradient, tuple[Part, ...]]:
    """The same sum, with the leading parts that will not be left out any more made one."""
    n = 0
    while n < len(parts) and parts[n].run not in unfinished:
        n += 1
    return (total(first, parts[:n]), parts[n:]) if n else (first, parts)


def without(run: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Those that others have added."""
    return tuple([part for part in parts if part.run != run])


def _sum(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """As AccumulateGrad does; a sparse gradient becomes dense when a dense one is added to it."""
    return new + old if old.is_sparse and not new.is_sparse else old + new


def is_total(gradient: Gradient, first: Gradient, parts: Iterable[Part]) -> bool:
    """Whether a gradient is this sum, bit by bit, and not what a hook has made of it.

    What carries a graph is not taken for one: to add it again would need the graph.
    """
    expected = total(first, parts)
    if gradient is None or expected is None:
        return gradient is expected
    if gradient.requires_grad:
        return False
    return _same(gradient, expected)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (t.to_dense() if t.layout is not torch.strided else t for t in (one, other))
    return bool(((one == other) | ((one != one) & (other != other))).all())
