"""The entry of one leaf in an undo log: what was there before the run, and what came after.

The methods `before` and `after` are the hooks around the node that adds to the leaf.

Note [Leaves of a backward inside a run]: a pass in a context adds to the context's *map* from leaf
to gradient, not to `.grad`. But a Function may run a backward of its own (a checkpoint, a
reversible block) and read, right afterwards, the gradients of leaves that it made for it. So what
such an inner backward adds stays in `.grad` at first: it is *parked*. It is moved to the map when a
run next opens the leaf, or when the enclosing run is over. Leaves that the Function made for itself
have died by then, because an entry holds its leaf and the gradient there only weakly.

Note [Passes that meet at a leaf]: when a pass fails, others may have added to the same leaf since.
Then what was there before the pass is put back, and what the others added is added again, in their
order. The result is bit for bit what it would be without the failed pass. A run that has an undo
log tells the entries of all unfinished passes what it adds. A plain backward has none; hooks on the
leaf notice it, and stay until the pass is over. Where a sum cannot be made again (a hook has
changed it, the program has used it up or written to it, it has a graph), the gradient stays as it
is, and the coordinator of the failed pass is told.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.hooks import RemovableHandle

from gradwire.autograd.undo.leaf import (
    Addition,
    Gradient,
    Leaf,
    copy_of,
    folded,
    is_same,
    is_total,
    total,
    version_of,
    without,
)
from gradwire.errors import BackwardTimeout, UsageError
from gradwire.torch_private import Node, accumulator_of, current_run

if TYPE_CHECKING:
    from gradwire.autograd.undo.undo_log import UndoLog

_GONE = torch.empty(0)
"""stands for a gradient that has died; no leaf has this one"""


@final
class LeafEntry:
    """What one run did to one leaf. hot: one for each leaf of a pass"""

    is_open = is_touched = _is_guest = False
    _is_shared = _is_spoilt = False
    """whether others have added since; whether a sum cannot be made again"""
    _node: Node | None = None
    _handles: tuple[RemovableHandle, ...] = ()
    _old: Gradient = None
    """what was there before the run, its version then, and a copy of it"""
    _old_version = _version = 0
    _value: Gradient = None
    _new: weakref.ref[torch.Tensor] | None = None
    """what this run, and what others added after it, have left there; `_version` is its own"""
    _left: Gradient = None
    """a copy of that, if it is a view"""
    _since: tuple[Addition, ...] = ()
    _coming: dict[int, tuple[Begun, tuple[Addition, ...]]] | None = None

    def __init__(self, undo_log: UndoLog, record: Leaf) -> None:
        self.undo_log, self._record = undo_log, record

    @property
    def leaf(self) -> torch.Tensor | None:
        """The leaf, if it is alive: its node holds it, or the map, or the program."""
        return self._record.tensor()

    # -- hooks

    def watch(self, node: Node) -> None:
        """Hook into the node that adds to the leaf."""
        self._node = node  # its hooks live as long as it does
        self._handles = (node.register_prehook(self.before), node.register_hook(self.after))

    def unwatch(self) -> None:
        """Remove the hooks."""
        handles, self._handles, self._node = self._handles, (), None
        for handle in handles:
            handle.remove()

    def before(self, gradients: Any) -> Any:  # noqa: ANN401
        """The engine is about to add to this leaf. Returns the gradient to add instead, or None.

        Also called without a gradient: post-accumulate hooks then still run, and read `.grad`.
        """
        undo_log = self.undo_log
        gradient: Gradient = gradients[0]
        if current_run() != undo_log.run:
            if self.is_touched:
                self._other_begins(gradient)
            return None
        if undo_log.outer is not None and self._is_open_around():
            return None
        self.open()
        if len(self._record.unfinished) > 1:
            self._added = copy_of(gradient)
        if undo_log.into is None or self._old is not None or gradient is None:
            return None
        # AccumulateGrad keeps the tensor itself if nothing else holds it. If a node gave one tensor
        # to two leaves, the second gets a copy, as in torch.distributed.autograd. The `is` is
        # needed because Python uses the id of a dead tensor again.
        known = undo_log.given.get(id(gradient))
        if known is not None and known() is gradient:
            return (gradient.clone(),)
        undo_log.given[id(gradient)] = weakref.ref(gradient)
        return None

    def after(self, _inputs: object, _outputs: object) -> None:
        """The engine has added to this leaf, and its hooks have run."""
        # Not called if one of them raised: then `unwatch` of the undo log closes the entry.
        if current_run() == self.undo_log.run:
            if self.is_open:
                self.close()
        elif self.is_touched:
            self._other_ends()

    # -- while the run adds to the leaf

    def open(self) -> None:
        """Put what the run adds to into `.grad`, and the first time remember it for the undo."""
        record, into = self._record, self.undo_log.into
        leaf = record.tensor()
        assert leaf is not None, "its node holds it"
        if not record.lock.acquire(False):
            record.wait(self.undo_log.patience())
        if record.parked is not None:
            record.parked.move()
        own = self._own = leaf.grad
        now = own if into is None else into.get(leaf)
        if now is not own:
            self._check_fits(leaf, own)
        is_first, self.is_touched = not self.is_touched, True
        self.is_open, self._added = True, None
        if is_first:  # listed before anything can raise: `UndoLog.unwatch` closes it
            self._old = now
            self.undo_log.entries.append(self)
            record.unfinished.append(self)
        if now is not own:
            leaf.grad = now
        version, value = 0, None
        if now is not None:
            version = now._version
            if is_first or len(record.unfinished) > 1:
                value = now.detach().clone()
        self._begun = now, version, value
        if is_first:
            self._old_version, self._value = version, value

    def _check_fits(self, leaf: torch.Tensor, own: Gradient) -> None:
        """UsageError if the `.grad` of a leaf could not be put back after the run."""
        try:
            leaf.grad = own
        except RuntimeError as error:  # the leaf was changed by its `.data`
            self._record.lock.release()
            raise UsageError(
                f"a leaf of shape {tuple(leaf.shape)} has a .grad that does not fit it: {error}",
                hint="set its .grad to None when you change the leaf by .data",
            ) from error

    def close(self) -> None:
        """Remember the gradient after the run, and put the leaf's own `.grad` back."""
        leaf = self._record.tensor()
        is_guest, self.is_open, self._is_guest = self._is_guest, False, False
        try:
            if leaf is not None and not is_guest:
                self._close(leaf)
        finally:
            self._record.lock.release()

    def _close(self, leaf: torch.Tensor) -> None:
        record, into, new = self._record, self.undo_log.into, leaf.grad
        if into is not None:
            if self.undo_log.outer is None:
                self._to_map(leaf, new, into)
            else:
                record.parked = self
                self.undo_log.outermost.parked.append(self)
        self._set_new(new)
        if len(record.unfinished) > 1:
            self._tell_others(new)

    def _to_map(
        self, leaf: torch.Tensor, new: Gradient, into: dict[torch.Tensor, torch.Tensor]
    ) -> None:
        if new is None:  # a hook may have used it up
            into.pop(leaf, None)
        elif into.get(leaf) is not new:
            into[leaf] = new
        if new is not self._own:
            leaf.grad = self._own

    # -- a backward inside a run; see Note [Leaves of a backward inside a run]

    def _is_open_around(self) -> bool:
        """Whether the enclosing run has this leaf open or parked; then its entry undoes both.

        If so the lock is held until `close`, so that no other run opens the leaf.
        """
        record, undo_log = self._record, self.undo_log
        record.wait(undo_log.patience())
        parked = record.parked
        is_parked = parked is not None and parked.undo_log.outermost is undo_log.outermost
        self.is_open = self._is_guest = is_parked or undo_log.is_open_around(self.leaf)
        if not self.is_open:
            record.lock.release()
        return self.is_open

    def watch_again(self) -> bool:
        """The enclosing run is over: notice later additions from now on. False for a dead leaf."""
        leaf = self.leaf
        if leaf is None:
            self.keep()
            return False
        node = accumulator_of(leaf) if self.undo_log.into is None else None
        if node is not None:  # a hook may have frozen the leaf: then nothing adds to it
            self.watch(node)
        return True

    def move(self) -> None:
        """Move what is parked to the map, unless another run has."""
        with self._record:
            leaf, into = self.leaf, self.undo_log.into
            if self._record.parked is not self:
                return
            self._record.parked = None
            if leaf is not None and into is not None:
                new = leaf.grad
                self._to_map(leaf, new, into)
                self._set_new(new)

    def _set_new(self, new: Gradient) -> None:
        if new is None:
            self._version, self._new = 0, None
        else:
            self._version, self._new = new._version, weakref.ref(new)
            if new._is_view():
                self._left = copy_of(new)

    def _is_as_left(self, now: Gradient, version: int, value: Gradient) -> bool:
        """Whether nobody has changed a gradient, which has this value and version now.

        Views of one buffer, as those of gradient_as_bucket_view, share one version: it also grows
        when another leaf of the buffer is added to. So what is left in a view is compared.
        """
        if now is not self._last():
            return False
        if version == self._version:
            return True
        return self._left is not None and value is not None and is_same(value, self._left)

    def _last(self) -> Gradient:
        """The gradient as the run left it, or as the last known addition did; _GONE if it died."""
        new = None if self._new is None else self._new()
        return _GONE if new is None and self._new is not None else new

    # -- other passes; see Note [Passes that meet at a leaf]

    def _tell_others(self, new: Gradient) -> None:
        added = () if self._added is None else (Addition(self.undo_log.run, self._added),)
        for other in tuple(self._record.unfinished):
            if other is not self and other.undo_log.into is self.undo_log.into:
                other._other_added(self._begun, added, new)

    def _other_begins(self, gradient: Gradient) -> None:
        """A run without an undo log is about to add to the leaf."""
        leaf, run = self.leaf, current_run()
        if leaf is not None and self.undo_log.into is None and self.undo_log.is_unlogged(run):
            now, added = leaf.grad, copy_of(gradient)
            begun = now, version_of(now), copy_of(now)
            self._coming = self._coming or {}
            self._coming[run] = begun, () if added is None else (Addition(run, added),)

    def _other_ends(self) -> None:
        coming, leaf = (self._coming or {}).pop(current_run(), None), self.leaf
        if coming is not None and leaf is not None:
            with self._record:
                self._other_added(*coming, leaf.grad)

    def _other_added(self, begun: Begun, added: tuple[Addition, ...], now: Gradient) -> None:
        """Another run has found `begun`, added `added` and left `now`."""
        found, version, value = begun
        if found is None and now is None:  # a hook has used it up at once
            return
        with torch.no_grad():
            is_known = self._is_as_left(found, version, value)
            if not is_known or not is_total(now, value, added):
                self._is_spoilt = True
                return
            runs = {entry.undo_log.run for entry in tuple(self._record.unfinished)}
            self._value, self._since = folded(self._value, (*self._since, *added), runs)
            self._is_shared = True
        self._set_new(now)

    # -- the end of the pass

    def keep(self) -> None:
        """The pass has ended well, or there is nothing to revert. Does not block."""
        if self._handles:
            self.unwatch()
        if self in self._record.unfinished:
            self._record.unfinished.remove(self)

    def put_back(self) -> bool:
        """Revert the addition; False if that is no longer possible."""
        self.unwatch()
        try:
            with self._record, torch.no_grad():
                return self._put_back()
        except BackwardTimeout:
            self.keep()  # it stays part of the sum
            return False

    def _put_back(self) -> bool:
        record, into, leaf = self._record, self.undo_log.into, self.leaf
        # Entries of passes that end well are removed meanwhile, without the lock. So the order is
        # taken from a copy, and this entry is removed by identity, not by its place.
        order = tuple(record.unfinished)
        if self not in order:  # it was kept when its leaf died
            return True
        place = order.index(self)
        record.unfinished.remove(self)
        if leaf is None:
            return True
        now = leaf.grad if into is None else into.get(leaf)
        if self._is_spoilt or not self._is_as_left(now, version_of(now), now):
            return False
        left = self._replayed(now) if self._is_shared else self._restored()
        if into is None:
            leaf.grad = left
        elif left is None:
            into.pop(leaf, None)
        else:
            into[leaf] = left
        for n, other in enumerate(order):
            if other is not self and other.undo_log.into is into:
                other._forget(self, left, came_later=n > place)
        return True

    def _restored(self) -> Gradient:
        """What was there before the run, as the same tensor."""
        old, value = self._old, self._value
        # Only if it was changed in place: if a hook has put another tensor there, it is intact.
        if old is not None and value is not None and old._version != self._old_version:
            old.copy_(value)
        return old

    def _replayed(self, now: Gradient) -> Gradient:
        """What was there before the run plus what others added, in the tensor that is there now."""
        made = total(self._value, self._since)
        if now is None or made is None or now.layout is not torch.strided:
            return made
        return now.copy_(made)

    def _forget(self, failed: LeafEntry, left: Gradient, *, came_later: bool) -> None:
        """The addition of a failed pass was reverted, and `left` is there now."""
        if came_later:  # what this run found included what the failed one had added
            self._is_shared, self._value = True, copy_of(failed._value)
            self._since = without(self.undo_log.run, failed._since)
        else:
            self._since = without(failed.undo_log.run, self._since)
        self._set_new(left)


Begun = tuple[Gradient, int, Gradient]
"""The gradient that a run finds at a leaf: the tensor, its version and its value."""
