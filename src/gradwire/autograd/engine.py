"""The autograd engine of one worker: what crosses here in forward and in backward.

It ties the parts of this layer together, and the Send and Recv nodes call it. Passes begin in
backward/coordinator.py and run on other workers in backward/participant.py; open contexts are in
graph/context.py.

Note [Gradients are never shared]: when `send_gradients` returns, the channel has copied the bytes,
so other holders of the buffer may write to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import torch

from gradwire.agent.agent import Agent
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.agent.serving.thread_pool import Job
from gradwire.autograd.backward.active_pass import AnyPass, CoordinatedPass
from gradwire.autograd.backward.coordinator import Coordinator
from gradwire.autograd.backward.engine_run import this_thread
from gradwire.autograd.backward.participant import Participant
from gradwire.autograd.backward.pass_table import PassTable
from gradwire.autograd.backward.reach import check_order
from gradwire.autograd.graph.closing import Forgetting
from gradwire.autograd.graph.context import Contexts
from gradwire.autograd.graph.crossing import arrive, check_crossing, check_gradients, leave
from gradwire.autograd.graph.walk import tensors_in
from gradwire.autograd.messages import Crossing, Forget, Gradients
from gradwire.autograd.scope import Saving
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.errors import BadMessage, ContextClosed, PeerLost, UsageError
from gradwire.ids import ContextId, EdgeId, WorkerId, first_of, opener_of, spoken_context
from gradwire.options import Timeout, Timeouts
from gradwire.torch_private import current_run
from gradwire.wire.tensor import encode_tensors


@final
class Engine:
    """The autograd engine of one worker."""

    def __init__(
        self,
        agent: Agent,
        timeouts: Timeouts,
        inside: Callable[[ContextId], AbstractContextManager[None]],
        due: Callable[[Timeout], float],
        *,
        edge_per_message: bool = False,
    ) -> None:
        me = agent.directory.me
        self._edge_per_message = edge_per_message
        self._agent = agent
        self.directory = agent.directory
        self._me = me.id
        self._ref = weakref.ref(self)  # See Note [Nodes hold no context]
        self.limits = agent.limits
        self._edges = PeerLimit("edges", agent.limits.edges)
        first = first_of(agent.directory.myself.incarnation)
        self.contexts = Contexts(
            me.id,
            me.name,
            first=first,
            most=agent.limits.contexts,
            maybe_too_old=agent.directory.maybe_too_old,
            lock=agent.directory.lock,
        )
        self.saving: Saving | None = None
        seconds, locks = timeouts.backward, LeafLocks()
        self.passes = PassTable(agent, due, seconds)
        self.coordinator = Coordinator(agent, self.passes, locks)
        self._participant = Participant(agent, self.contexts, self.passes, locks, inside, seconds)
        self.deadline_for_peer = self._participant.deadline
        self._forgetting = Forgetting(agent, self.contexts, self.close)
        agent.handle(Gradients, self._serve_gradients, Lane.CONTROL)
        agent.on_peer_lost(self._peer_lost)

    # -- forward

    def attach_send(
        self, id: ContextId, peer: WorkerId, tensors: Sequence[torch.Tensor]
    ) -> list[Crossing]:
        """Record the edges by which the tensors of a message leave that require a gradient.

        Nothing is recorded once the context is closed: the graph is cut there.
        """
        differentiable = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
        if not differentiable:
            return []
        context = self.contexts.heard_of(id)
        if context is None:
            return []
        groups = [differentiable] if self._edge_per_message else [[n] for n in differentiable]
        ref, me = self._ref, self._me
        return [leave(context, ref, me, peer, places, tensors) for places in groups]

    def attach_recv(
        self,
        id: ContextId,
        peer: WorkerId,
        crossings: Sequence[Crossing],
        tensors: list[torch.Tensor],
    ) -> bool:
        """Replace each tensor that crossed by an edge by the output of a Recv node.

        False, and nothing is replaced, once the context is closed.
        """
        context = self.contexts.heard_of(id, peer)
        if context is None:
            return False
        count, most = len(crossings), self.limits.edges
        self._edges.take(peer, count)
        with context.lock:  # no calls in here, see docs/threads.md
            edges_of = context.edges_of
            edges_of[peer] = edges_of[peer] + count if peer in edges_of else count
        for crossed in crossings:
            check_crossing(crossed, peer, tensors, most)
            arrive(context, self._ref, self._me, peer, crossed, tensors)
        return True

    def withdraw(self, id: ContextId, crossings: Sequence[Crossing]) -> None:
        """The message did not leave: forget its crossings."""
        context = self.contexts.maybe(id)
        if context is not None:
            for crossed in crossings:
                context.sent[crossed.edge.n] = None  # its number is not used again

    def depth_of(self, id: ContextId | None, value: object) -> int:
        """The depth of the tensors in a value, above which its next thread must make nodes."""
        context = None if id is None else self.contexts.maybe(id)
        if context is None:
            return 0
        return context.walk.origin(tensor.grad_fn for tensor in tensors_in(value)).depth

    # -- backward: what the nodes call

    def wait_for_gradients(
        self, context: ContextId, edge: EdgeId, peer: WorkerId
    ) -> list[torch.Tensor | None]:
        """Called by a Send: wait until its edge is settled, and take its gradients."""
        active = self._active_pass(context, edge)
        if isinstance(active, CoordinatedPass):
            self.coordinator.send_starts(active)
        if not active.has_come(edge):
            check_order(active.context, edge, active.edges_sent)
            self._agent.wait(peer, lambda: active.has_come(edge), lambda: active.await_edge(edge))
        gradients, crossings = active.take_gradients(edge)
        if not crossings:
            return gradients
        present = [gradient for gradient in gradients if gradient is not None]
        self.attach_recv(context, peer, crossings, present)
        alive = iter(present)
        return [None if gradient is None else next(alive) for gradient in gradients]

    def send_gradients(
        self,
        context: ContextId,
        edge: EdgeId,
        peer: WorkerId,
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Called by a Recv: send the gradients of its edge, unless the pass ends at that Recv.

        See Note [Gradients are never shared]. If the last gradients of a run go to the coordinator,
        they are held until the engine has returned, and stand for RunDone too. Under create_graph a
        gradient may require a gradient itself, and crosses by an edge as values do.
        """
        active = self._active_pass(context, edge)
        active.edges_sent.add(edge)
        if isinstance(active, CoordinatedPass) and edge in active.stops:
            return
        present = [gradient for gradient in gradients if gradient is not None]
        crossings = self.attach_send(context, peer, present) if torch.is_grad_enabled() else []
        headers, payload = encode_tensors(present, self.limits)
        there = [True] * len(present)
        if len(present) < len(gradients):
            there = [gradient is not None for gradient in gradients]
        message = Gradients(context, active.id, edge, there, headers, crossings)
        if self._agent.events.are_heard:
            self._agent.events.emit("gradients", edge, self._agent.directory.name(peer))
        if isinstance(active, CoordinatedPass):
            self.coordinator.send(active, peer, message, payload)
        elif active.is_last() and peer == active.id.worker:
            active.held = message, payload  # sent by Participant._tell_done
        else:
            self._agent.tell(peer, message, payload, deadline=active.deadline, phase="backward")

    def _active_pass(self, id: ContextId, edge: EdgeId) -> AnyPass:
        """See Note [Which pass a node runs for], backward/pass_table.py."""
        active = self.passes.of_run(current_run())
        if active is None:
            if not this_thread.is_ordered:
                # Nor is its failure seen: the next run looks for tasks that it has left.
                this_thread.has_leftovers = True
            active = self.coordinator.begin_native(self.contexts.find(id), edge)
        if active.context.id != id:
            self.contexts.find(id)  # says so if it is closed
            raise UsageError(
                f"{edge} of {spoken_context(id)} was met by a backward in {active.context}",
                hint="a graph may not mix two contexts: detach what is kept from one to the next",
            )
        return active

    def _serve_gradients(self, message: Gradients, payload: Payload, source: Source) -> None:
        context = self.contexts.maybe(message.context)
        if context is not None and not check_gradients(context, message.edge, source.worker):
            context = None
        active = None if context is None else self.passes.heard_of(context, message.pass_id)
        if active is None:
            self._agent.events.emit("late", message.edge)
            self._agent.noting.came_late(source.worker)
            return
        if active.has_come(message.edge) and active.error is None:
            name = self._agent.directory.name(source.worker)
            twice = BadMessage(f"{message.edge} was settled twice in {active.id} by {name}")
            active.fail(twice.about(name, phase="backward"))
            return
        active.settle(message, payload, self.limits)
        if message.last:
            active.worker_done(source.worker, has_changed=message.has_changed)

    def stop(self, reason: str) -> None:
        """This worker shuts down: fail its passes, which wakes waiting threads; close contexts."""
        for active in self.passes.all():
            active.fail(PeerLost(reason))
            self.passes.over(active)
            if isinstance(active, CoordinatedPass) or active.undo_log is None:
                continue
            if active.wait_for_run(0):
                # Nobody will say how the pass ended: its changes stay, and nobody is told.
                active.undo_log.keep(lambda _: None)
        for id in self.contexts.all():
            self.contexts.close(id)

    # -- the life of a context

    def save_tensors_by(self, saving: Saving) -> None:
        """Graphs that are made in contexts from now on keep the tensors they need this way."""
        self.saving = saving

    def calling(self, id: ContextId | None, peer: WorkerId) -> ContextId | None:
        """A call to this peer is about to be made: its context, if that is still open here.

        A call in a closed context must not open it again on the peer.
        """
        context = None if id is None else self.contexts.heard_of(id)
        if context is None:
            return None
        context.called.add(peer)
        return context.id

    def works_in(self, id: ContextId, source: Source) -> None:
        """A peer's call is about to run in this context, unless that peer is lost by now."""
        context = self.contexts.heard_of(id, source.worker)
        if context is None or not self.contexts.called_by(context, source.worker):
            self.contexts.check_word(id, source.worker)
        try:
            self._agent.check_asker(source)
        except PeerLost:  # its loss may have been handled before the context was added
            self._forgetting.ask(id)
            raise

    def called(self, id: ContextId | None, peer: WorkerId) -> None:
        """The call has left. If its context was closed meanwhile, the peer may not have heard."""
        if id is not None and self.contexts.maybe(id) is None:
            self._forgetting.tell(peer, Forget(id, self.contexts.lost_with(id) or ""))

    def close(
        self, id: ContextId, lost: str | None = None, said_by: WorkerId | None = None
    ) -> None:
        """Drop a context here and on every worker that was called in it, as `lost` was lost.

        `said_by` a peer that did not open it.
        """
        context = self.contexts.close(id, lost, said_by)
        if context is None:
            return
        with context.lock:
            edges_of, context.edges_of = context.edges_of, {}
        for peer, count in edges_of.items():
            self._edges.give_back(peer, count)
        for ending in list(context.endings.values()):
            ending.drop()
        for active in self.passes.in_context(id):
            why = "" if lost is None else f", as {lost} was lost"
            here = self._agent.directory.me.name
            active.fail(ContextClosed(f"{context} was closed on {here}{why}"))
            # A pass that began elsewhere is ended by its coordinator, which knows its outcome.
            if isinstance(active, CoordinatedPass) or active.undo_log is None:
                self.passes.over(active)
        for worker in tuple(context.called):
            if worker != self._me:
                self._forgetting.tell(worker, Forget(id, lost or ""))

    def _peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        """Drop what is known now only: a peer that comes back may open new contexts meanwhile."""
        self.passes.peer_lost(worker, error)
        known, settle = self.contexts.all(), self._participant.coordinator_lost(worker)
        self._agent.dispatch.service.submit(partial(self._forget_lost, worker, known, settle))

    def _forget_lost(self, worker: WorkerId, known: list[ContextId], settle: Job) -> None:
        for id in known:
            if opener_of(id) == worker:
                self.close(id, lost=self._agent.directory.name(worker))
            elif opener_of(id) != self._me:
                self._forgetting.ask(id)
        settle()
