"""What the runs of a worker share about one leaf, and the sums of gradients that runs make there.

Floating-point sums depend on their order, so an addition is never undone by a subtraction: what was
there before it is kept, and what others added after it is added again, in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, NamedTuple, final

import torch

from gradwire.errors import BackwardTimeout
from gradwire.threads import call_after_fork, renew_after_fork

if TYPE_CHECKING:
    from gradwire.autograd.undo.leaf_entry import LeafEntry

Gradient = torch.Tensor | None
LEAF_SECONDS = 60.0


@final
class Leaf:
    """One leaf that a run has met.

    `lock` is held while a node adds to the leaf, hooks included, and while an addition is reverted,
    and to read or write the other fields. But entries of passes that ended well are removed from
    `unfinished` without it, by one operation on a list.
    """

    __slots__ = ("lock", "parked", "tensor", "unfinished")

    def __init__(self, tensor: weakref.ref[torch.Tensor]) -> None:
        self.lock = threading.RLock()
        self.tensor = tensor
        self.unfinished: list[LeafEntry] = []
        """of the passes that have added to it and are not over, in the order in which they did"""
        self.parked: LeafEntry | None = None
        """of a backward inside a run: the entry whose gradient is still in `.grad`"""

    def wait(self, seconds: float | None = None) -> None:
        """Acquire the lock, or raise BackwardTimeout."""
        seconds = LEAF_SECONDS if seconds is None else seconds
        if not self.lock.acquire(timeout=max(0.0, seconds)):
            leaf = self.tensor()
            shape = () if leaf is None else tuple(leaf.shape)
            raise BackwardTimeout(
                f"a leaf of shape {shape} was held for {seconds:.3g} s "
                "by the hooks of another backward",
                hint="a hook on a leaf must not wait for a pass that needs the same leaf",
            )

    def __enter__(self) -> None:
        self.wait()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@final
class LeafLocks:
    """The `Leaf` of each leaf of a worker that a run has met."""

    def __init__(self) -> None:
        self._leaves: dict[int, Leaf] = {}
        call_after_fork(self)

    def forked(self) -> None:
        """In a forked process: an error that ends a backward there reverts what it has added."""
        renew_after_fork(*[leaf.lock for leaf in self._leaves.values()])

    def __len__(self) -> int:
        return len(self._leaves)

    def of(self, leaf: torch.Tensor) -> Leaf:
        """The record of this leaf, removed when the leaf dies. hot: once for each leaf of a pass"""
        number = id(leaf)
        known = self._leaves.get(number)
        if known is None:
            tensor = weakref.ref(leaf, lambda _: self._leaves.pop(number, None))
            # One step for the interpreter: another thread, or a finalizer, may have added it.
            known = self._leaves.setdefault(number, Leaf(tensor))
        return known


# -- sums of gradients; pure but for the tensors


class Addition(NamedTuple):
    """What one engine run has added to a leaf."""

    run: int
    gradient: torch.Tensor


def copy_of(gradient: Gradient) -> Gradient:
    """Its value now, without a graph."""
    return None if gradient is None else gradient.detach().clone()


def version_of(gradient: Gradient) -> int:
    """How often it was written to."""
    return 0 if gradient is None else gradient._version


def total(first: Gradient, additions: Iterable[Addition]) -> Gradient:
    """A new tensor: `first` plus each of the additions, in order, as torch adds them."""
    result = copy_of(first)
    for added in additions:
        result = added.gradient.clone() if result is None else _sum(result, added.gradient)
    return result


def folded(
    first: Gradient, additions: tuple[Addition, ...], unfinished: Container[int]
) -> tuple[Gradient, tuple[Addition, ...]]:
    """The same sum, with the leading additions that can no longer be reverted in `first`."""
    n = 0
    while n < len(additions) and additions[n].run not in unfinished:
        n += 1
    return (total(first, additions[:n]), additions[n:]) if n else (first, additions)


def without(run: int, additions: tuple[Addition, ...]) -> tuple[Addition, ...]:
    """The additions of all other runs."""
    return tuple([added for added in additions if added.run != run])


def _sum(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """As AccumulateGrad does; a sparse gradient becomes dense when a dense one is added to it."""
    return new + old if old.is_sparse and not new.is_sparse else old + new


def is_total(gradient: Gradient, first: Gradient, additions: Iterable[Addition]) -> bool:
    """Whether a gradient is this sum, bit by bit: False if a hook has changed it.

    False too for a gradient that has a graph: to add it again would need the graph.
    """
    expected = total(first, additions)
    if gradient is None or expected is None:
        return gradient is expected
    if gradient.requires_grad:
        return False
    return is_same(gradient, expected)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same values."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (t.to_dense() if t.layout is not torch.strided else t for t in (one, other))
    return bool(((one == other) | ((one != one) & (other != other))).all())
