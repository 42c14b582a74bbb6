"""The undo log of one engine run: what it adds to leaves, and how to revert that.

Torch's own AccumulateGrad nodes run, with every hook on them: leaf hooks, post-accumulate hooks and
those of DDP. A run adds to `.grad`, or to the map of a context from leaf to gradient. For one run
gradwire puts two more hooks around each of those nodes:

    to .grad     before: remember what was there, to put it back if the pass fails
    to the map   before: put what the context has so far in the place of `.grad`
                 after: move the sum to the map, and put `.grad` back

So hooks see the gradient of the context where they look for it. A leaf is *open* while its `.grad`
holds the sum of the context. It is locked while it is open, as runs of several contexts may meet on
it; a plain local backward does not take that lock.

Note [Callbacks at the end of a run]: what hooks leave to the end of a run may look at leaves, as
DDP's reducer, which writes its averages there. So all leaves of the run are opened again before the
first such callback. Those of Python code are seen when they are queued; those of DDP, which is C++,
are expected wherever torch.distributed is initialized.

Note [A pass ends once]: three threads may learn that a pass has ended here: the one that ran it,
the one that reads the coordinator's message, and the one that notices that the coordinator is lost.
The first, by `_ends`, ends the log: it keeps all changes, or reverts all of them in reverse order.
Another that wants to revert waits until that is over, because it then says that the revert is done.
It is no lock, so that `keep`, which runs on a thread that reads a channel, never waits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import final

import torch

from gradwire.agent.requests.promise import Promise
from gradwire.autograd.graph.context import Context
from gradwire.autograd.undo.leaf import LEAF_SECONDS, LeafLocks
from gradwire.autograd.undo.leaf_entry import LeafEntry
from gradwire.autograd.undo.nested_pass import Nested
from gradwire.torch_private import NO_RUN, Node, current_run, when_run_ends

_log = logging.getLogger("gradwire")
_UNDO_SECONDS = 60.0
"""How long another thread may take to revert a pass."""
_by_run: dict[int, UndoLog] = {}
"""The undo logs of the current runs. Torch numbers runs over the whole process."""


def undo_log_of_run() -> UndoLog | None:
    """The undo log of the current run, if it has one."""
    return _by_run.get(current_run())


@final
class UndoLog:
    """The changes of one run: to the map of `context`, or without one to `.grad` itself."""

    run = NO_RUN
    inner = _stuck = 0
    """how many entries belong to backwards inside the run; how many could not be reverted"""
    _is_reopened = False
    seconds_left: Callable[[], float] | None = None
    """how long the pass may still take"""

    def __init__(
        self, locks: LeafLocks, context: Context | None, outer: UndoLog | None = None
    ) -> None:
        self._locks, self.context = locks, context
        self.into = None if context is None else context.gradients
        self.outer = outer
        """the undo log of the run around it, for a backward that a Function runs"""
        self.entries: list[LeafEntry] = []
        """of the leaves that the run has touched, in order"""
        self._watched: list[LeafEntry] = []
        self.nested: list[Nested] = []
        """the passes that have ended well in backwards inside the run"""
        self.parked: list[LeafEntry] = []
        """See Note [Leaves of a backward inside a run], leaf_entry.py"""
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}
        """the gradients that were added to new leaves, by identity"""
        self._ends = count()
        """counted in one step: the first thread that ends the log gets 0"""
        self._over: Promise[None] = Promise()

    @property
    def outermost(self) -> UndoLog:
        """That of the outermost run. Not an attribute: a log that held itself would be a cycle."""
        return self if self.outer is None else self.outer.outermost

    def patience(self) -> float:
        """How long the run may wait for a leaf that another backward holds, in seconds."""
        left = self.outermost.seconds_left
        return LEAF_SECONDS if left is None else min(LEAF_SECONDS, left())

    def inside(self) -> UndoLog:
        """The undo log of a backward that a Function runs inside this run."""
        return UndoLog(self._locks, self.context, self)

    def enter(self) -> None:
        """The current run is the one to log."""
        self.run = current_run()
        _by_run[self.run] = self

    def watch(self, accumulators: Iterable[Node]) -> None:
        """Log what these nodes do in the run, until `unwatch`."""
        for node in accumulators:
            leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
            entry = LeafEntry(self, self._locks.of(leaf))
            entry.watch(node)
            self._watched.append(entry)

    def unwatch(self) -> None:
        """The run is over."""
        _by_run.pop(self.run, None)
        watched, self._watched = self._watched, []
        for entry in (*self.entries, *watched):  # guests that are open are only in the last
            if entry.is_open:  # it was reopened, or a hook raised between `before` and `after`
                entry.close()
        # Hooks on leaves that go to `.grad` stay until the pass is over: they see the additions of
        # runs without an undo log. See Note [Passes that meet at a leaf], leaf_entry.py.
        stay = self.into is None and self.outer is None
        for entry in watched:
            if not (stay and entry.is_touched):
                entry.unwatch()
        if self.outer is not None:
            self.outer.entries += self.entries
            self.outer.inner += len(self.entries)
            self.outer.nested += self.nested
        elif self.inner:  # the entries of the backwards inside are from now on like its own
            for entry in self.parked:
                entry.move()
            self.parked.clear()
            self.entries = [e for e in self.entries if e.undo_log is self or e.watch_again()]

    def is_open_around(self, leaf: torch.Tensor | None) -> bool:
        """Whether a run around this one has the leaf open: it is in a hook of that leaf."""
        outer = self.outer
        if outer is None:
            return False
        is_open = any(entry.is_open and entry.leaf is leaf for entry in outer.entries)
        return is_open or outer.is_open_around(leaf)

    def is_unlogged(self, run: int) -> bool:
        """Whether a run has no undo log, so that nothing tells what it adds."""
        return run not in _by_run

    def reopen_at_end(self, others: Iterable[torch.Tensor] = ()) -> None:
        """Open all leaves of the run, and `others`, before callbacks that are queued after this."""
        if not self._is_reopened and self.outer is None:
            self._is_reopened = True
            when_run_ends(partial(self._reopen, others))

    def _reopen(self, others: Iterable[torch.Tensor]) -> None:
        # By ascending id, the same order in all runs: here a run holds more than one lock.
        own = [entry for entry in self.entries if entry.undo_log is self]
        entries = {id(entry.leaf): entry for entry in own}
        for leaf in others:
            if id(leaf) not in entries:
                entries[id(leaf)] = LeafEntry(self, self._locks.of(leaf))
        for number in sorted(entries):
            entries[number].open()

    @property
    def has_changed(self) -> bool:
        """Whether there is something to keep or to revert."""
        return bool(self.entries or self.nested)

    def keep(self, submit: Callable[[Callable[[], None]], object] = lambda act: act()) -> None:
        """The pass has ended well. `submit` runs what sends, if this thread must not send."""
        if next(self._ends):
            return
        try:
            for entry in self.entries:
                entry.keep()
            self.entries.clear()
            for nested in self.nested:
                submit(nested.end_well)
            self.nested.clear()
        finally:
            self._over.settle(None)

    def undo(self, seconds: float = _UNDO_SECONDS) -> bool:
        """The pass has failed: revert its changes.

        If another thread does that already, wait for it; False if it takes longer than `seconds`.
        """
        if not next(self._ends):
            try:
                self._revert()
            finally:
                self._over.settle(None)
        try:
            self._over.wait(seconds)
        except TimeoutError:
            return False
        return True

    def _revert(self) -> None:
        while self.nested:
            try:
                self._stuck += not self.nested.pop().give_up()
            except Exception:  # the rest is reverted all the same
                self._stuck += 1
                _log.exception("a pass inside a failed one could not be taken back")
        while self.entries:
            try:
                if self.entries.pop().put_back():
                    continue
                _log.error("a gradient of a failed pass stays: it was used or changed since")
            except Exception:  # the rest is reverted all the same
                _log.exception("a gradient of a failed pass could not be reverted")
            self._stuck += 1

    def what_stays(self, me: str) -> str:
        """After `undo`: a sentence about the gradients that could not be reverted, or ''."""
        stuck = self._stuck + len(self.entries)  # an interrupt may have left some
        if not stuck:
            return ""
        what = "a gradient stays" if stuck == 1 else f"{stuck} gradients stay"
        return f"{what} as it is on {me}: what the pass had added was used or changed since"
