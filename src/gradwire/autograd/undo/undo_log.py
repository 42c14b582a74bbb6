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

What happens to one leaf is in leaf_entry.py. A backward that a Function runs inside a run has a
undo log of its own, whose entries become part of the outer one's (backward/inner_backward.py).

Note [A pass ends once]: several threads may learn that a pass has ended here. The one that ran it
sees that it failed meanwhile, its root says so, and the connection to the root is lost. The first
of them to take the token ends the books: it keeps all of it or puts all of it back, one leaf
after the other in the opposite order. Others that put back wait until that is over, since they tell
the root, or let its next pass begin. It is no lock: whoever puts back waits for other workers, and
`keep` runs on a thread that reads a channel, so it never waits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import final

import torch

from gradwire.agent.requests.promise import Promise
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.autograd.undo.leaf_entry import Entry
from gradwire.autograd.undo.nested_pass import Nested
from gradwire.torch_private import NO_RUN, Node, current_run

_log = logging.getLogger("gradwire")
_UNDO_SECONDS = 60.0
"""How long somebody else may take to put a pass back."""
_by_run: dict[int, UndoLog] = {}
"""Of the runs that keep books now. Torch numbers runs over the whole process."""


def ledger_of_run() -> UndoLog | None:
    """The books of the current run, if it keeps any."""
    return _by_run.get(current_run())


@final
class UndoLog:
    """The gradients of one run. `into` is the context's map, or None for `.grad` itself.

    `outer` is the undo log of the run around it, for a backward that a Function runs.
    """

    def __init__(
        self,
        locks: LeafLocks,
        into: dict[torch.Tensor, torch.Tensor] | None,
        outer: UndoLog | None = None,
    ) -> None:
        self._locks = locks
        self.into, self.outer = into, outer
        self.outermost: UndoLog = self if outer is None else outer.outermost
        self.entries: list[Entry] = []
        """of the leaves that the run has touched, in order"""
        self.inner = 0
        """how many of them are those of backwards inside the run"""
        self.nested: list[Nested] = []
        """the passes that have ended well in backwards inside the run"""
        self.parked: list[Entry] = []
        """See Note [Leaves of a backward inside a run], leaf_entry.py"""
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}
        """the gradients that were added to new leaves, by identity"""
        self.run = NO_RUN
        self._stuck = 0
        """how many gradients could not be put back"""
        self._token = [None]
        """of who ends the books; see Note [A pass ends once]"""
        self._over: Promise[None] = Promise()

    def inside(self) -> UndoLog:
        """The books of a backward inside this run."""
        return UndoLog(self._locks, self.into, self)

    def enter(self) -> None:
        """The current run is the one."""
        self.run = current_run()
        _by_run[self.run] = self

    def watch(self, accumulators: Iterable[Node]) -> list[Entry]:
        """Keep the books of what these do in the run, until `unwatch`."""
        watched = []
        for node in accumulators:
            leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
            entry = Entry(self, leaf, self._locks.of(leaf))
            entry.watch(node)
            watched.append(entry)
        return watched

    def unwatch(self, watched: list[Entry]) -> None:
        """The run is over."""
        _by_run.pop(self.run, None)
        for entry in self.entries:
            if entry.is_open:  # reopened, or a hook raised between the two of ours
                entry.close()
        stay = self.into is None and self.outer is None
        for entry in watched:
            if entry.is_open:  # as a guest
                entry.close()
            if not (stay and entry.is_touched):
                entry.unwatch()
        if self.outer is not None:
            self._join(self.outer)
        elif self.inner:
            self._take_in()

    def _join(self, outer: UndoLog) -> None:
        for entry in self.entries:
            if entry.leaf is not None:
                entry.loosen()
        outer.entries += self.entries
        outer.inner += len(self.entries)
        outer.nested += self.nested

    def _take_in(self) -> None:
        """The backwards inside are over with the run: what they have done is like its own."""
        for entry in self.parked:
            entry.settle()
        self.parked.clear()
        self.entries = [e for e in self.entries if e.leaf is not None or e.tighten()]

    def is_open_around(self, leaf: torch.Tensor) -> bool:
        """Whether a run around this one has the leaf open: it is in a hook of that leaf."""
        outer = self.outer
        while outer is not None:
            if any(entry.is_open and entry.leaf is leaf for entry in outer.entries):
                return True
            outer = outer.outer
        return False

    def is_without_books(self) -> bool:
        """Whether the current run, which is not ours, tells nobody what it adds."""
        return current_run() not in _by_run

    def reopen(self, others: Iterable[torch.Tensor]) -> None:
        """The engine is through, its callbacks are not: they may write to these leaves too.

        In one order for all runs, since here a run holds more than one lock.
        """
        touched = {id(entry.leaf): entry for entry in self.entries if entry.leaf is not None}
        leaves = {id(leaf): leaf for leaf in others if id(leaf) not in touched}
        for number in sorted([*touched, *leaves]):
            if number in touched:
                touched[number].reopen()
            else:
                leaf = leaves[number]
                Entry(self, leaf, self._locks.of(leaf)).open()

    @property
    def has_changed(self) -> bool:
        """Whether there is something to keep or to put back."""
        return bool(self.entries or self.nested)

    def _is_first_to_end(self) -> bool:
        """Take the token; False if somebody has. One step for the interpreter."""
        try:
            self._token.pop()
        except IndexError:
            return False
        return True

    def keep(self, submit: Callable[[Callable[[], None]], object] | None = None) -> None:
        """The pass has ended well. What would send is submitted, where sending is not allowed."""
        if not self._is_first_to_end():
            return
        try:
            self._drop_entries()
            for nested in self.nested:
                if submit is None:
                    nested.end_well()
                else:
                    submit(nested.end_well)
            self.nested.clear()
        finally:
            self._over.settle(None)

    def drop(self) -> None:
        """This worker leaves: nobody will say how the pass ended."""
        if self._is_first_to_end():
            self._drop_entries()
            self._over.settle(None)

    def _drop_entries(self) -> None:
        for entry in self.entries:
            entry.keep()
        self.entries.clear()

    def undo(self, seconds: float = _UNDO_SECONDS) -> bool:
        """The pass has failed: put back what was there before. False if that is not over yet.

        Somebody else may be at it, who is given so many seconds.
        """
        if not self._is_first_to_end():
            try:
                self._over.wait(seconds)
            except TimeoutError:
                return False
            return True
        try:
            self._put_back()
        finally:
            self._over.settle(None)
        return True

    def _put_back(self) -> None:
        while self.nested:
            try:
                self._stuck += not self.nested.pop().give_up()
            except Exception:  # the rest is put back all the same
                self._stuck += 1
                _log.exception("a pass inside a failed one could not be taken back")
        while self.entries:
            if not self.entries.pop().put_back():
                self._stuck += 1
                _log.error("a gradient of a failed pass stays: it was used or changed since")

    def what_stays(self, me: str) -> str:
        """After `undo`: what could not be put back, if anything."""
        stuck = self._stuck + len(self.entries)  # which an interrupt has left there
        if not stuck:
            return ""
        count = "a gradient stays" if stuck == 1 else f"{stuck} gradients stay"
        return f"{count} as it is on {me}: what the pass had added was used or changed since"
