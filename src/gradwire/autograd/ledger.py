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
from typing import Any, final

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
        self._lock = threading.RLock()
        self._locks: dict[int, tuple[threading.RLock, weakref.ref[torch.Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    def of(self, leaf: torch.Tensor) -> threading.RLock:
        """The lock of this leaf. By identity: when the leaf dies its lock is forgotten.

        hot: once for each leaf of a pass
        """
        number = id(leaf)
        known = self._locks.get(number)
        if known is None:
            with self._lock:
                known = self._locks.get(number)
                if known is None:
                    death = weakref.ref(leaf, lambda _: self._locks.pop(number, None))
                    # A finalizer may have come in between, and asked for the same.
                    known = self._locks.setdefault(number, (threading.RLock(), death))
        return known[0]


@final
class Ledger:
    """The gradients of one run. `into` is the context's map, or None for `.grad` itself."""

    def __init__(self, locks: LeafLocks, into: dict[torch.Tensor, torch.Tensor] | None) -> None:
        self._locks = locks
        self.into = into
        self.entries: list[_Entry] = []
        """of the leaves that the run has touched, in order"""
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}
        """the gradients that were added to new leaves, by identity"""
        self.run: int | None = None

    def watch(self, accumulators: Iterable[Node]) -> list[RemovableHandle]:
        """Keep the books of what these do, for the run named in `run`, until `unwatch`."""
        handles = []
        for node in accumulators:
            leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
            entry = _Entry(self, leaf, self._locks.of(leaf))
            handles.append(node.register_prehook(entry.before))
            handles.append(node.register_hook(entry.after))
        return handles

    def unwatch(self, handles: list[RemovableHandle]) -> None:
        """The run is over."""
        for handle in handles:
            handle.remove()
        for entry in self.entries:
            if entry.is_open:  # reopened, or a hook raised between the two of ours
                entry.close()

    def reopen(self, others: Iterable[torch.Tensor]) -> None:
        """The engine is through, its callbacks are not: they may write to these leaves too.

        In one order for all runs, since here a run holds more than one lock.
        """
        touched = {id(entry.leaf): entry for entry in self.entries}
        leaves = {id(leaf): leaf for leaf in others if id(leaf) not in touched}
        for number in sorted([*touched, *leaves]):
            if number in touched:
                touched[number].reopen()
            else:
                leaf = leaves[number]
                _Entry(self, leaf, self._locks.of(leaf)).open()

    def keep(self) -> None:
        """The pass has ended well."""
        self.entries.clear()

    def undo(self) -> None:
        """The pass has failed: put back what was there before."""
        for entry in reversed(self.entries):
            entry.put_back()
        self.entries.clear()


@final
class _Entry:
    """One leaf in the books of one run: what was there before, and what the run left there.

    Its methods `before` and `after` are the hooks around the node that adds to the leaf.

    hot: one for each leaf of a pass
    """

    __slots__ = (
        "_ledger",
        "_lock",
        "_new",
        "_old",
        "_old_version",
        "_own",
        "_value",
        "_version",
        "is_open",
        "leaf",
    )

    def __init__(self, ledger: Ledger, leaf: torch.Tensor, lock: threading.RLock) -> None:
        self._ledger, self.leaf, self._lock = ledger, leaf, lock
        self.is_open = False

    def before(self, gradients: Any) -> Any:  # noqa: ANN401
        """The engine is about to add to this leaf; another gradient, if it should add that one.

        Also without a gradient to add: post-accumulate hooks run then too, and look at `.grad`.
        AccumulateGrad keeps the tensor it is given where nobody else has it. One that a node gave
        to two leaves is copied for both, as in torch.distributed.autograd.
        """
        ledger = self._ledger
        if current_run() != ledger.run:
            return None
        self.open()
        gradient: Gradient = gradients[0]
        if ledger.into is None or self._old is not None or gradient is None:
            return None
        known = ledger.given.get(id(gradient))
        if known is not None and known() is gradient:  # the number of one that died is used again
            return (gradient.clone(),)
        ledger.given[id(gradient)] = weakref.ref(gradient)
        return None

    def after(self, _inputs: object, _outputs: object) -> None:
        """The engine has added to this leaf, and its hooks have run.

        Nothing is to be done for a hook that raised, or for a run inside of ours.
        """
        if self.is_open and current_run() == self._ledger.run:
            self.close()

    def open(self) -> None:
        """Remember what the run finds, and put it where the run looks for it."""
        if not self._lock.acquire(False):
            self._wait_for_lock()
        leaf, into = self.leaf, self._ledger.into
        own = self._own = leaf.grad
        old = self._old = self._new = own if into is None else into.get(leaf)
        self._value, self._old_version = None, 0
        self.is_open = True
        self._ledger.entries.append(self)
        if old is not own:
            leaf.grad = old
        if old is not None:
            self._value, self._old_version = old.detach().clone(), old._version

    def reopen(self) -> None:
        """The same once more: what was there before the run is known."""
        if not self._lock.acquire(False):
            self._wait_for_lock()
        leaf, into = self.leaf, self._ledger.into
        own = self._own = leaf.grad
        self.is_open = True
        if into is not None:
            new = self._new = into.get(leaf)
            if new is not own:
                leaf.grad = new

    def close(self) -> None:
        """Remember what the run leaves, and put the leaf's own gradient back."""
        leaf, into = self.leaf, self._ledger.into
        new = leaf.grad
        if into is not None:
            if new is None:  # also if a hook has used it up
                into.pop(leaf, None)
            elif new is not self._new:
                into[leaf] = new
            if new is not self._own:
                leaf.grad = self._own
        self._new, self._version = new, 0 if new is None else new._version
        self.is_open = False
        self._lock.release()

    def _wait_for_lock(self) -> None:
        if not self._lock.acquire(timeout=_LEAF_SECONDS):
            raise BackwardTimeout(
                f"a leaf of shape {tuple(self.leaf.shape)} was held for {_LEAF_SECONDS:g} s "
                "by the hooks of another backward",
                hint="a hook on a leaf must not wait for a pass that needs the same leaf",
            )

    def put_back(self) -> None:
        """The pass has failed."""
        with self._lock, torch.no_grad():
            self._put_back()

    def _put_back(self) -> None:
        leaf, into, old = self.leaf, self._ledger.into, self._old
        now = leaf.grad if into is None else into.get(leaf)
        if now is not self._new or _version(now) != self._version:
            _log.error("a gradient of a failed pass stays: another pass has added to it since")
            return
        touched = _version(old) != self._old_version  # also if a hook has replaced it since
        if old is not None and self._value is not None and touched:
            old.copy_(self._value)
        if into is None:
            leaf.grad = old
        elif old is None:
            into.pop(leaf, None)
        else:
            into[leaf] = old


def _version(gradient: Gradient) -> int:
    return 0 if gradient is None else gradient._version
