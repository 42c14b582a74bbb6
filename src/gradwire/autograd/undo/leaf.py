"""What the runs of a worker share about one leaf: its lock, and what is not settled yet."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, final

import torch

from gradwire.errors import BackwardTimeout

if TYPE_CHECKING:
    from gradwire.autograd.undo.leaf_entry import Entry

_LEAF_SECONDS = 60.0


@final
class Leaf:
    """One leaf that a run has met.

    `lock` is held while a node adds to the leaf, hooks included; and while a gradient is taken
    back. Everything else here is read and written by whoever holds it, except that entries of
    passes that ended well are removed from `unfinished` without it: one operation on a list.
    """

    __slots__ = ("_death", "lock", "parked", "unfinished")

    def __init__(self, death: weakref.ref[torch.Tensor]) -> None:
        self.lock = threading.RLock()
        self._death = death
        self.unfinished: list[Entry] = []
        """of the passes that have added to it and are not over, in the order in which they did"""
        self.parked: Entry | None = None
        """of a backward inside a run: the entry whose gradient is still in `.grad`"""

    def wait(self) -> None:
        """Wait for the lock, so long at most."""
        if not self.lock.acquire(timeout=_LEAF_SECONDS):
            leaf = self._death()
            shape = () if leaf is None else tuple(leaf.shape)
            raise BackwardTimeout(
                f"a leaf of shape {shape} was held for {_LEAF_SECONDS:g} s "
                "by the hooks of another backward",
                hint="a hook on a leaf must not wait for a pass that needs the same leaf",
            )


@final
class LeafLocks:
    """One record for each leaf of a worker that a run has met."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._leaves: dict[int, Leaf] = {}

    def __len__(self) -> int:
        return len(self._leaves)

    def of(self, leaf: torch.Tensor) -> Leaf:
        """The record of this leaf. By identity: when the leaf dies its record is forgotten.

        hot: once for each leaf of a pass
        """
        number = id(leaf)
        known = self._leaves.get(number)
        if known is None:
            with self._lock:
                known = self._leaves.get(number)
                if known is None:
                    death = weakref.ref(leaf, lambda _: self._leaves.pop(number, None))
                    # A finalizer may have come in between, and asked for the same.
                    known = self._leaves.setdefault(number, Leaf(death))
        return known
