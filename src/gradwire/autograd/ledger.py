"""Where the leaves of one run keep their gradients, and how to take them back.

Torch's own AccumulateGrad nodes run, with every hook on them: leaf, post-accumulate and those that
DDP puts there. Around each of them stand two hooks of ours, for the time of one run:

    to .grad     before: remember what was there; if the pass fails, it is put back
    to the map   before: put what the context has so far in the place of `.grad`
                 after: take the sum out again, and put `.grad` back

So hooks see the gradient of the context where they look for it. So do the callbacks that run when
the engine is through, in which DDP's reducer writes its averages: for their time all leaves of the
run are open again. A leaf is locked while it is open, as runs of several contexts may meet on it. A
plain local backward or an optimizer does not take that lock: it must not use a leaf's `.grad` while
another thread differentiates into a map.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch.utils.hooks import RemovableHandle

from gradwire.autograd.torch_private import Node, current_run
from gradwire.errors import BackwardTimeout

_log = logging.getLogger("gradwire")
_LEAF_SECONDS = 60.0
Gradient = torch.Tensor | None


@final
class LeafLocks:
    """One lock for each leaf of a worker that a run has met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[int, tuple[threading.RLock, weakref.ref[torch.Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    def of(self, leaf: torch.Tensor) -> threading.RLock:
        """The lock of this leaf. By identity: when the leaf dies its lock is forgotten.

        hot: twice for each leaf of a pass
        """
        number = id(leaf)
        known = self._locks.get(number)
        if known is None:
            with self._lock:
                known = self._locks.get(number)
                if known is None:
                    death = weakref.ref(leaf, lambda _: self._locks.pop(number, None))
                    known = self._locks[number] = (threading.RLock(), death)
        return known[0]

    def acquire(self, leaf: torch.Tensor) -> threading.RLock:
        """Take the lock of this leaf, or say that its hooks hold it too long."""
        lock = self.of(leaf)
        if not lock.acquire(timeout=_LEAF_SECONDS):
            raise BackwardTimeout(
                f"a leaf of shape {tuple(leaf.shape)} was held for {_LEAF_SECONDS:g} s "
                "by the hooks of another backward",
                hint="a hook on a leaf must not wait for a pass that needs the same leaf",
            )
        return lock


@dataclass(slots=True)
class _Entry:
    """A leaf this run has touched: what was there before, and what the run left there."""

    leaf: torch.Tensor
    old: Gradient
    value: Gradient
    old_version: int
    new: Gradient = None
    version: int = 0


class _Opened(NamedTuple):
    """A leaf whose `.grad` is in use: its entry, the `.grad` to come back, the lock held for it."""

    entry: _Entry
    own: Gradient
    lock: threading.RLock


@final
class Ledger:
    """The gradients of one run. `into` is the context's map, or None for `.grad` itself."""

    def __init__(self, locks: LeafLocks, into: dict[torch.Tensor, torch.Tensor] | None) -> None:
        self._locks = locks
        self._into = into
        self._entries: list[_Entry] = []
        self._open: dict[int, _Opened] = {}
        self._given: set[int] = set()
        self.run: int | None = None

    @property
    def is_map(self) -> bool:
        """Whether `.grad` stays as it was."""
        return self._into is not None

    @property
    def has_entries(self) -> bool:
        """Whether there is anything to keep or to undo."""
        return bool(self._entries)

    def watch(self, accumulators: Iterable[Node]) -> list[RemovableHandle]:
        """Keep the books of what these do, for the run named in `run`, until `unwatch`."""
        handles = []
        for node in accumulators:
            leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
            handles.append(node.register_prehook(_Before(self, leaf)))
            handles.append(node.register_hook(_After(self, leaf)))
        return handles

    def unwatch(self, handles: list[RemovableHandle]) -> None:
        """The run is over."""
        for handle in handles:
            handle.remove()
        for opened in list(self._open.values()):  # or a hook raised between the two of ours
            self.after(opened.entry.leaf)

    def before(self, leaf: torch.Tensor, gradient: Gradient = None) -> Gradient:
        """The engine is about to add to this leaf; another gradient, if it should add that one.

        AccumulateGrad keeps the tensor it is given where nobody else has it. One that a node gave
        to two leaves is copied for both, as in torch.distributed.autograd.
        """
        lock = self._locks.acquire(leaf)
        own = leaf.grad
        current = own if self._into is None else self._into.get(leaf)
        copy = None if current is None else current.detach().clone()
        entry = _Entry(leaf, current, copy, _version(current))
        self._entries.append(entry)
        self._open[id(leaf)] = _Opened(entry, own, lock)
        if self._into is None:
            return None
        leaf.grad = current
        return self._apart(gradient) if current is None else None

    def _apart(self, gradient: Gradient) -> Gradient:
        """By identity: as long as a leaf may keep a tensor, its number is nobody else's."""
        if gradient is None:
            return None
        if id(gradient) in self._given:
            return gradient.clone()
        self._given.add(id(gradient))
        return None

    def maybe_after(self, leaf: torch.Tensor) -> None:
        """The engine has been at this leaf, unless a hook raised before ours could run."""
        if id(leaf) in self._open:
            self.after(leaf)

    def after(self, leaf: torch.Tensor) -> None:
        """The engine has added to this leaf, and its hooks have run."""
        entry, own, lock = self._open.pop(id(leaf))
        new = entry.new = leaf.grad
        entry.version = _version(new)
        if self._into is not None:
            if new is None:  # also if a hook has used it up
                self._into.pop(leaf, None)
            else:
                self._into[leaf] = new
            leaf.grad = own
        lock.release()

    def reopen(self, others: Iterable[torch.Tensor]) -> None:
        """The engine is through, its callbacks are not: they may write to these leaves too.

        In one order for all runs, since here a run holds more than one lock.
        """
        touched = {id(entry.leaf): entry for entry in self._entries}
        leaves = {id(leaf): leaf for leaf in others}
        leaves |= {number: entry.leaf for number, entry in touched.items()}
        for number in sorted(leaves):
            leaf, entry = leaves[number], touched.get(number)
            if entry is None:
                self.before(leaf)
                continue
            lock = self._locks.acquire(leaf)
            self._open[number] = _Opened(entry, leaf.grad, lock)
            if self._into is not None:
                leaf.grad = self._into.get(leaf)

    def keep(self) -> None:
        """The pass has ended well."""
        self._entries.clear()

    def undo(self) -> None:
        """The pass has failed: put back what was there before."""
        for entry in reversed(self._entries):
            with self._locks.of(entry.leaf), torch.no_grad():
                self._put_back(entry)
        self._entries.clear()

    def _put_back(self, entry: _Entry) -> None:
        leaf, into = entry.leaf, self._into
        now = leaf.grad if into is None else into.get(leaf)
        if now is not entry.new or _version(now) != entry.version:
            _log.error("a gradient of a failed pass stays: another pass has added to it since")
            return
        touched = _version(entry.old) != entry.old_version  # also if a hook has replaced it since
        if entry.old is not None and entry.value is not None and touched:
            entry.old.copy_(entry.value)
        if into is None:
            leaf.grad = entry.old
        elif entry.old is None:
            into.pop(leaf, None)
        else:
            into[leaf] = entry.old


class _Before:
    def __init__(self, ledger: Ledger, leaf: torch.Tensor) -> None:
        self._ledger, self._leaf = ledger, leaf

    def __call__(self, gradients: Any) -> Any:  # noqa: ANN401
        # Also without a gradient to add: post-accumulate hooks run then too, and look at `.grad`.
        if current_run() != self._ledger.run:
            return None
        other = self._ledger.before(self._leaf, gradients[0])
        return None if other is None else (other,)


class _After:
    def __init__(self, ledger: Ledger, leaf: torch.Tensor) -> None:
        self._ledger, self._leaf = ledger, leaf

    def __call__(self, *_: Any) -> None:  # noqa: ANN401
        if current_run() == self._ledger.run:
            self._ledger.maybe_after(self._leaf)


def _version(gradient: Gradient) -> int:
    return 0 if gradient is None else gradient._version
