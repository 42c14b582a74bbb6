"""The contexts that one worker knows: those it has opened, and those of its peers' calls.

A context has a map of gradients for `backward(context, …)`, and an end, which releases the edges
that were made in it whether or not their tensors are alive.

Only the opener of a context closes it, and tells every worker that knows it: those it has called in
it, and those that have heard of it from somebody else, which ask the opener to be told. A worker
drops the contexts of an opener that is lost. One that was too slow to take the message is told
again, or it would keep the gradients of the context for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import msgspec
import torch

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.timer import Resender
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.release import Releases
from gradwire.autograd.messages import Attended, Forget, QueryContext
from gradwire.errors import (
    BadMessage,
    ContextClosed,
    DeadlinePassed,
    GradwireError,
    StaleIncarnation,
    UsageError,
)
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
_FEW_EDGES = 1 << 10
_SECONDS = 10.0
_AT_ONCE_SECONDS = 1.0
"""The thread that closes a context does not wait long for a peer that cannot be reached. The next
tries to tell it have threads of their own."""
_FIRST_AGAIN_SECONDS = 0.25
_TIMES = 10


@final
class Context(msgspec.Struct, weakref=True, eq=False):
    """The gradients of `backward(context, roots)` here, and the edges that were made in it."""

    id: ContextId
    source: WorkerId | None = None
    """the peer that made it known here; None if it was opened here"""
    sent: dict[int, None] = {}
    received: dict[EdgeId, None] = {}
    kept: list[Node] = []
    """Recvs that live until it is closed, as torch has it"""
    called: set[WorkerId] = set()
    """where it was opened: the workers to tell when it is closed"""
    gradients: dict[torch.Tensor, torch.Tensor] = {}
    prune_at: int = _FEW_EDGES
    """so many edges sent, or received, may be many that are over"""

    def prune(self, edges: Edges) -> None:
        """Forget edges that are over: some contexts stay open for hours."""
        for n in tuple(self.sent):
            if n not in edges.sent:
                self.sent.pop(n, None)
        for edge in tuple(self.received):
            if not edges.is_alive(edge):
                self.received.pop(edge, None)
        self.prune_at = _FEW_EDGES + 2 * (len(self.sent) + len(self.received))

    def __str__(self) -> str:
        return spoken_context(self.id)


@final
class Contexts:
    """Opened here or heard of from a peer; a closed one is not created again by a late message."""

    def __init__(
        self,
        directory: Directory,
        first: int = 0,
        most: int = 1 << 12,
        register: Callable[[ContextId], None] = lambda _: None,
    ) -> None:
        self._directory, self._register = directory, register
        self._quota = PeerLimit("contexts", most)
        self._me, self._lock = directory.me.id, directory.lock
        self._first = self.opened = first
        """the number of the next one that is opened here"""
        self._open: dict[ContextId, Context] = {}
        self.maybe = self._open.get
        """the context, if it is open here"""
        self._closed: dict[ContextId, str | None] = {}
        self.lost_with = self._closed.get
        """the worker whose loss has closed a context of others, if it was that"""

    def __len__(self) -> int:
        return len(self._open)

    def new(self) -> Context:
        """Open one here."""
        with self._lock:
            n = self.opened
            self.opened = n + 1  # at once: a finalizer may open one while ours is made
            return self._made(context_id(self._me, n))

    def heard_of(self, id: ContextId, source: WorkerId | None = None) -> Context | None:
        """A peer works in this context: the one we know, or a new one; None if it was closed.

        A new one counts as one of `source`. If another worker opened it, that is asked to tell when
        it closes it (`register`). StaleIncarnation: see Note [Contexts and incarnations],
        agent/peers/directory.py.
        """
        context = self._open.get(id)
        if context is not None:
            return context
        opener = opener_of(id)
        with self._lock:
            if id in self._closed or opener == self._me:
                return self._open.get(id)
            if id not in self._open:
                self._check_young(id)
            context = self._open.get(id) or self._made(id, source)
        if source is not None and source != opener:
            self._register(id)
        return context

    def find(self, id: ContextId) -> Context:
        """The context, or an error that says what became of it."""
        context = self._open.get(id)
        if context is not None:
            return context
        unknown = f"Could not find autograd context with id: {id}"
        if self.is_over(id):
            lost, here = self._closed.get(id), self._directory.me.name
            why = "" if lost is None else f", as {lost} was lost"
            raise ContextClosed(
                f"{unknown}: {spoken_context(id)} is closed on {here}{why}",
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

    def is_over(self, id: ContextId) -> bool:
        """Whether it was here, or would have been, and is no more."""
        was_opened = opener_of(id) == self._me and self._first <= count_of(id) < self.opened
        return id in self._closed or (was_opened and id not in self._open)

    def all(self) -> list[ContextId]:
        """Every open one."""
        with self._lock:
            return list(self._open)

    def _check_young(self, id: ContextId) -> None:
        why = self._directory.maybe_too_old(id)
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


@final
class Forgetting:
    """What one worker has to say about contexts that are closed."""

    def __init__(
        self,
        agent: Agent,
        contexts: Contexts,
        releases: Releases,
        close: Callable[[ContextId, str | None], None],
    ) -> None:
        self._agent, self._contexts, self._close = agent, contexts, close
        self._releases = releases
        self._resender: Resender[Callable[[], None]] = Resender(agent.timer, self._send_again)
        agent.handle(Forget, self._serve_forget, Lane.SERVICE)
        agent.handle(QueryContext, self._serve_query, Lane.SERVICE)
        agent.kinds.add(Attended)

    def tell(self, worker: WorkerId, context: ContextId, tried: int = 0) -> None:
        """Tell it now, or later if that fails."""
        try:
            limit = self._agent.clock.now() + (_SECONDS if tried else _AT_ONCE_SECONDS)
            edges = self._releases.riding_to(worker)
            self._agent.tell(worker, Forget(context, edges), deadline=limit)
            self._releases.rode(worker, edges)
        except UsageError:  # this worker has shut down
            return
        except GradwireError:
            self._agent.events.note("unforgotten", spoken_context(context))
            self._try_again(partial(self.tell, worker, context, tried + 1), tried)

    def ask(self, context: ContextId, tried: int = 0) -> None:
        """Ask its opener to tell when a context is closed; close it here if it is closed there."""
        if self._contexts.maybe(context) is None:
            return
        heard = partial(self._heard, context, tried)
        limit = self._agent.clock.now() + _SECONDS
        what = f"whether {spoken_context(context)} is open"
        try:
            _, answer = self._agent.request(
                opener_of(context), QueryContext(context), deadline=limit, description=what
            )
        except UsageError:  # this worker has shut down
            return
        except GradwireError as error:
            heard(error)
        else:
            answer.on_settled(heard)

    def _heard(self, context: ContextId, tried: int, outcome: Outcome) -> None:
        """Who does not answer in time is asked again; without an opener there is no context."""
        if isinstance(outcome, DeadlinePassed) and tried < _TIMES:
            self._try_again(partial(self.ask, context, tried + 1), tried)
            return
        said = outcome.message if isinstance(outcome, Answer) else None
        if not isinstance(said, Attended) or not said.is_open:
            opener = self._agent.directory.name(opener_of(context))
            lost = opener if isinstance(outcome, Exception) else None
            self._agent.dispatch.service.submit(partial(self._close, context, lost))

    def _serve_forget(self, message: Forget, _: Payload, source: Source) -> None:
        if source.worker != opener_of(message.context):
            context = spoken_context(message.context)
            raise BadMessage(f"w{source.worker} closes {context}, which it has not opened")
        self._close(message.context, None)
        self._releases.heard(message.released, source.worker)

    def _serve_query(self, message: QueryContext, _: Payload, source: Source) -> None:
        if opener_of(message.context) != self._agent.directory.me.id:
            raise BadMessage(f"{spoken_context(message.context)} was not opened here")
        context = self._contexts.maybe(message.context)
        if context is not None:
            context.called.add(source.worker)
            context = self._contexts.maybe(message.context)  # it may have closed just before
        is_open = context is not None or count_of(message.context) >= self._contexts.opened
        limit = self._agent.clock.now() + _SECONDS
        self._agent.answer(source, Attended(is_open), deadline=limit)

    def _try_again(self, act: Callable[[], None], tried: int) -> None:
        if tried < _TIMES:
            self._resender.keep(act, _FIRST_AGAIN_SECONDS * 2**tried)

    def _send_again(self, due: list[Callable[[], None]]) -> None:
        for act in due:
            self._agent.dispatch.service.submit(act)
