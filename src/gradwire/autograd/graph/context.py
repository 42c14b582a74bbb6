"""The contexts that one worker knows: those it has opened, and those of its peers' calls.

Edges belong to the world (edges.py). A context adds a map of gradients for `backward(context, …)`,
and an end, which releases the edges that were made in it whether or not their tensors are alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch

from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.errors import ContextClosed, StaleIncarnation, UsageError
from gradwire.ids import (
    ContextId,
    EdgeId,
    WorkerId,
    context_id,
    count_of,
    opener_of,
    spoken_context,
)
from gradwire.torch_private import Node

_CLOSED_REMEMBERED = 20_000


@final
@dataclass(slots=True, weakref_slot=True, eq=False)
class Context:
    """The gradients of `backward(context, roots)` here, and the edges that were made in it."""

    id: ContextId
    source: WorkerId | None = None
    """the peer that made it known here; None if it was opened here"""
    sent: list[int] = field(default_factory=list)
    received: list[EdgeId] = field(default_factory=list)
    kept: list[Node] = field(default_factory=list)
    """Recvs that live until it is closed, as torch has it"""
    called: set[WorkerId] = field(default_factory=set)
    """where it was opened: the workers to tell when it is closed"""
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        return spoken_context(self.id)


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
        register: Callable[[ContextId], None] = lambda _: None,
        lock: threading.RLock | None = None,
    ) -> None:
        self._quota = PeerLimit("contexts", most)
        self._maybe_too_old, self._register = maybe_too_old, register
        self._me, self._name = me, name
        self._lock = threading.RLock() if lock is None else lock
        self._first = self.opened = first
        """the number of the next one that is opened here"""
        self._open: dict[ContextId, Context] = {}
        self._closed: dict[ContextId, str | None] = {}
        """of others, with the worker whose loss has closed it, if it was that"""

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

        A new one counts as one of `source`, whichever worker opened it. If that was another one,
        it is asked to tell us when it closes the context (closing.py). StaleIncarnation if an
        earlier incarnation of this worker may have worked in it, or one of its opener made it.
        """
        context = self._open.get(id)
        if context is not None:
            return context
        with self._lock:
            if id in self._closed or opener_of(id) == self._me:
                return self._open.get(id)
            if id not in self._open:
                self._check_young(id)
            context = self._open.get(id) or self._made(id, source)
        if source is not None and source != opener_of(id):
            self._register(id)
        return context

    def find(self, id: ContextId) -> Context:
        """The context, or an error that says what became of it."""
        context = self._open.get(id)
        if context is not None:
            return context
        unknown = f"Could not find autograd context with id: {id}"
        if self.is_over(id):
            lost = self._closed.get(id)
            why = "" if lost is None else f", as {lost} was lost"
            raise ContextClosed(
                f"{unknown}: {spoken_context(id)} is closed on {self._name}{why}",
                hint="differentiate before the `with context()` block ends in which it was made",
            )
        self._check_young(id)
        raise UsageError(unknown)

    def close(self, id: ContextId, lost: str | None = None) -> Context | None:
        """Forget it for good, as `lost` was lost; the context, if it was open here."""
        with self._lock:
            if opener_of(id) != self._me:
                self._closed.setdefault(id, lost)
            if len(self._closed) > _CLOSED_REMEMBERED:
                del self._closed[next(iter(self._closed))]
            context = self._open.pop(id, None)
        if context is not None and context.source is not None:
            self._quota.give_back(context.source)
        return context

    def lost_with(self, id: ContextId) -> str | None:
        """The worker whose loss has closed it here, if it was that."""
        return self._closed.get(id)

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
        context = self._open[id] = Context(id, source)
        return context
