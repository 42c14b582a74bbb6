"""What one worker remembers of a forward pass, and the contexts that it knows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, final

import torch

from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.autograd.graph.crossing import (
    RECV,
    Join,
    Received,
    Sent,
    origin_of_recv,
    receives_no_more,
)
from gradwire.autograd.graph.walk import ROOM, Walk
from gradwire.errors import ContextClosed, PeerLost, StaleIncarnation, UsageError
from gradwire.ids import (
    ContextId,
    PassId,
    WorkerId,
    context_id,
    count_of,
    opener_of,
    spoken_context,
)

if TYPE_CHECKING:
    from gradwire.autograd.backward.rollback import Rollback

_CLOSED_REMEMBERED = 20_000


@final
@dataclass(slots=True, weakref_slot=True, eq=False)
class Context:
    """Its edges, in the order they were made, and the gradients of `backward(context, roots)`.

    Note [A context is not locked]: nodes are made while edges are recorded, and what makes objects
    may run the collector, and with it a finalizer of the user's that sends something itself. So no
    lock is held there. Each change is one step for the interpreter, or does no harm if it is done
    twice: two threads that walk over one node find the same, two Joins may stand for one set, two
    edges may have one depth. `lock`, the worker's, is for the passes and for counting.
    """

    id: ContextId
    walk: Walk
    lock: threading.RLock
    source: WorkerId | None = None
    """the peer that made it known here; None if it was opened here"""
    sent: list[Sent | None] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    broken: str | None = None
    """why nothing more can be differentiated here"""
    endings: dict[PassId, Rollback] = field(default_factory=dict)
    """failed passes of our own that some worker has not rolled back yet"""
    ended: set[PassId] = field(default_factory=set)
    passes: int = 0
    """how many that others began were heard of"""
    called: set[WorkerId] = field(default_factory=set)
    callers: set[WorkerId] = field(default_factory=set)
    """the peers that have had something done here in it"""
    edges_of: dict[WorkerId, int] = field(default_factory=dict)
    """how many of its edges came from each peer"""
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    _latest: int = 0
    _numbers: Iterator[int] = field(default_factory=count)

    def __str__(self) -> str:
        return spoken_context(self.id)

    def next_edge(self) -> int:
        """The number of a new edge, whose place in `sent` is empty until it is there."""
        self.sent.append(None)  # first: there are never fewer places than numbers
        return next(self._numbers)

    def next_depth(self, below: int) -> int:
        """The depth of a new edge that depends on others down to `below`.

        Deeper than the edges sent before, too: see Note [The order of waiting], walk.py.
        """
        depth = self._latest = max(below, min(self._latest, ROOM // 2)) + 1
        return depth

    def known_workers(self) -> set[WorkerId]:
        """The workers that were called from here, or answered with what has a graph."""
        return self.called | {sent.peer for sent in self.sent if sent is not None}


class _End(NamedTuple):
    """How a context ended here: by the loss of a peer, or on the word of one, if it was that."""

    lost: str | None = None
    said_by: WorkerId | None = None


_WELL = _End()


@final
class Contexts:
    """Opened here or heard of from a peer; a closed one is not created again by a late message."""

    def __init__(
        self,
        me: WorkerId,
        name: str,
        *,
        first: int = 0,
        most: int = 1 << 12,
        maybe_too_old: Callable[[ContextId], str | None] = lambda _: None,
        lock: threading.RLock | None = None,
    ) -> None:
        self._quota = PeerLimit("contexts", most)
        self._maybe_too_old = maybe_too_old
        self._me, self._name = me, name
        self._lock = threading.RLock() if lock is None else lock
        self._first = self.opened = first
        """the number of the next one that is opened here"""
        self._open: dict[ContextId, Context] = {}
        self._closed: dict[ContextId, _End] = {}
        """of our own only those that ended by a loss, or by what a peer said"""

    def __len__(self) -> int:
        return len(self._open)

    def new(self) -> Context:
        """Open one here."""
        with self._lock:
            n = self.opened
            self.opened = n + 1  # at once: a finalizer may open one while ours is made
            return self._made(context_id(self._me, n))

    def maybe(self, id: ContextId) -> Context | None:
        """The context, if it is open here."""
        return self._open.get(id)

    def heard_of(self, id: ContextId, source: WorkerId | None = None) -> Context | None:
        """A peer works in this context: the one we know, or a new one; None if it was closed.

        A new one counts as one of `source`, whichever worker opened it. StaleIncarnation if an
        earlier incarnation of this worker may have worked in it, or one of its opener made it.

        Note [Contexts that are lost]: a worker drops the contexts of an opener that it has lost. If
        only the connection was lost, the opener still works in them. What is then done here in
        such a context would be done outside of it, and its gradients would be missing, so it
        is refused: PeerLost.
        """
        context = self._open.get(id)
        if context is not None:
            return context
        with self._lock:
            if (lost := self.lost_with(id)) is not None:
                raise PeerLost(
                    f"{self._name} has lost {lost}, and dropped {spoken_context(id)} and its graph",
                    hint="begin again in a new context",
                )
            if id in self._closed or opener_of(id) == self._me:
                return self._open.get(id)
            if id not in self._open:
                self._check_young(id)
            return self._open.get(id) or self._made(id, source)

    def find(self, id: ContextId) -> Context:
        """The context, or an error that says what became of it."""
        context = self._open.get(id)
        if context is not None:
            return context
        unknown = f"Could not find autograd context with id: {id}"
        if self.is_over(id):
            end = self._closed.get(id, _WELL)
            why = "" if end.lost is None else f", as {end.lost} was lost"
            why += "" if end.said_by is None else f", as w{end.said_by} said"
            raise ContextClosed(
                f"{unknown}: {spoken_context(id)} is closed on {self._name}{why}",
                hint="backward must run inside the `with context()` block that made the graph",
            )
        self._check_young(id)
        raise UsageError(unknown)

    def close(
        self, id: ContextId, lost: str | None = None, said_by: WorkerId | None = None
    ) -> Context | None:
        """Forget it for good, as `lost` was lost; the context, if it was open here.

        If it is `said_by` a peer that did not open it, only while nobody else has called here.
        """
        with self._lock:
            context = self._open.get(id)
            if said_by is not None and (context is None or context.callers != {said_by}):
                return None
            if lost is not None or said_by is not None or opener_of(id) != self._me:
                end = _WELL if lost is None and said_by is None else _End(lost, said_by)
                known = self._closed.setdefault(id, end)
                if said_by is None and known.said_by is not None:
                    self._closed[id] = _End(known.lost)
            if len(self._closed) > _CLOSED_REMEMBERED:
                del self._closed[next(iter(self._closed))]
            context = self._open.pop(id, None)
        if context is not None:
            receives_no_more(context)
            if context.source is not None:
                self._quota.give_back(context.source)
        return context

    def lost_with(self, id: ContextId) -> str | None:
        """The worker whose loss has closed it here, if it was that."""
        end = self._closed.get(id)
        return None if end is None else end.lost

    def called_by(self, context: Context, peer: WorkerId) -> bool:
        """A peer has something done here in it: from now on it is not closed without its word.

        False if it is closed already.
        """
        if peer not in context.callers and peer != self._me:
            with self._lock:
                context.callers.add(peer)
        return context.id in self._open

    def check_word(self, id: ContextId, source: WorkerId) -> None:
        """ContextClosed if a peer still works in what is closed here on the word of another.

        Its opener has not said so. To do it outside of the context would lose its gradients.
        """
        end = self._closed.get(id)
        if end is not None and end.said_by not in (None, source):
            raise ContextClosed(
                f"{self._name} has dropped {spoken_context(id)}, as w{end.said_by} said",
                hint="begin again in a new context",
            )

    def is_over(self, id: ContextId) -> bool:
        """Whether it was here, or would have been, and is no more."""
        was_opened_here = opener_of(id) == self._me and self._first <= count_of(id) < self.opened
        return id in self._closed or (was_opened_here and id not in self._open)

    def all(self) -> list[ContextId]:
        """Every open one."""
        with self._lock:
            return list(self._open)

    def _check_young(self, id: ContextId) -> None:
        """See Note [Contexts and incarnations], agent/peers/directory.py."""
        why = self._maybe_too_old(id)
        if why is not None:
            raise StaleIncarnation(
                f"{spoken_context(id)} {why}",
                hint="begin again in a new context: what a lost worker computed is lost with it",
            )

    def _made(self, id: ContextId, source: WorkerId | None = None) -> Context:
        if source is not None:
            self._quota.take(source)
        context = Context(id, Walk(RECV, partial(origin_of_recv, id)), self._lock, source)
        self._open[id] = context
        return context
