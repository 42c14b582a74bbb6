"""The autograd engine of one worker: records edges in forward, sends gradients in backward.

It ties the parts of this layer together, and the Send and Recv nodes call it.

Note [Gradients are never shared]: when `send_gradients` returns, the channel has copied the bytes,
so other holders of the buffer may write to it. The last gradients of a run leave after the engine
has returned, so that they can also say that the run is over. Hooks and callbacks of the user run
between, which may write to the buffer: so they are copied, and large ones leave at once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import is_not
from typing import Any, final

import torch

from gradwire.agent.agent import Agent
from gradwire.agent.devices.links import DeviceLinks
from gradwire.agent.devices.own import ON_CPU
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.backward.active_pass import AnyPass, CoordinatedPass, ParticipantPass
from gradwire.autograd.backward.coordinator import Coordinator
from gradwire.autograd.backward.engine_run import check_order, leads_on, this_thread
from gradwire.autograd.backward.participant import Participant
from gradwire.autograd.backward.pass_table import PassTable
from gradwire.autograd.graph.context import Context, Contexts, Forgetting
from gradwire.autograd.graph.crossing import EdgeEnd, arrive, check_crossing, check_gradients, leave
from gradwire.autograd.graph.edges import Edges, LiveEdge
from gradwire.autograd.graph.lineage import meets, one, union
from gradwire.autograd.graph.release import Releases
from gradwire.autograd.messages import Crossing, Gradients
from gradwire.autograd.scope import Saving
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.current import spoken_line, user_line
from gradwire.errors import (
    BadMessage,
    ContextClosed,
    GradwireError,
    NotSerializable,
    OverLimit,
    PeerLost,
)
from gradwire.ids import ContextId, EdgeId, WorkerId, first_of, opener_of
from gradwire.options import Timeout, Timeouts
from gradwire.torch_private import Node, current_run, is_batched
from gradwire.wire.message import Buffer
from gradwire.wire.tensor import are_on_cpu, arrive_on_cpu, decode_tensors, encode_tensors

_log = logging.getLogger("gradwire")
_LONG_SECONDS, _MANY = 60.0, 100
"""At shutdown edges that are older than this are logged; so many of them are a warning."""
_HELD_BYTES = 1 << 16
"""More than so much is not copied to save a message."""
_is_there: Any = partial(is_not, None)
_FRAMES_OF_A_CALL = 6
"""The stack frames between `attach_send` and the code that made the call through rpc's `Calls`."""


@final
class Engine:
    """The autograd engine of one worker."""

    def __init__(
        self,
        agent: Agent,
        devices: DeviceLinks,
        timeouts: Timeouts,
        inside: Callable[[ContextId | None], AbstractContextManager[None]],
        due: Callable[[Timeout], float],
        *,
        edge_per_message: bool = False,
        only_in_contexts: bool = False,
    ) -> None:
        self._edge_per_message, self.only_in_contexts = edge_per_message, only_in_contexts
        self._agent, self.directory, self.limits = agent, agent.directory, agent.limits
        self.events = agent.events
        self.devices = devices
        self._me = agent.directory.me.id
        self._ref = weakref.ref(self)  # See Note [Nodes hold no table]
        first = first_of(agent.directory.myself.incarnation)
        self.edges = Edges(self._me, first, agent.limits.edges, agent.directory.lock)
        self.releases = Releases(agent, self.edges)
        self.contexts = Contexts(agent.directory, first, agent.limits.contexts, self._register)
        self.saving: Saving | None = None
        """how graphs made in contexts and by served functions keep the tensors they need"""
        seconds, locks = timeouts.backward, LeafLocks()
        self.passes = PassTable(agent, devices, self.edges, due, seconds)
        self.coordinator = Coordinator(agent, self.edges, self.passes, locks)
        self._participant = Participant(
            agent, self.contexts, self.edges, self.passes, locks, inside, seconds
        )
        self.deadline_for_peer = self._participant.deadline
        self._forgetting = Forgetting(agent, self.contexts, self.releases, self.close)
        agent.handle(Gradients, self._serve_gradients, Lane.CONTROL)
        agent.on_peer_lost(self._peer_lost)

    # -- forward

    def attach_send(
        self,
        id: ContextId | None,
        peer: WorkerId,
        tensors: Sequence[torch.Tensor],
        *,
        is_call: bool = False,
    ) -> list[Crossing]:
        """Record edges for those tensors of a message that require a gradient."""
        differentiable = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
        if not differentiable:
            return []
        context = None if id is None else self.contexts.maybe(id) or self._maybe_open(id)
        if context is None and self.only_in_contexts:
            return []
        tag = context and context.id
        is_one = self._edge_per_message or len(differentiable) == 1
        groups = [differentiable] if is_one else [[n] for n in differentiable]
        made = self._agent.clock.now(), user_line(_FRAMES_OF_A_CALL) if is_call else None
        edges, homes_of, left = self.edges, self.devices.homes_of, []
        try:
            for places in groups:
                crossed = leave(edges, self._ref, tag, peer, places, tensors, *made, homes_of)
                left.append(crossed)
                if context is not None:
                    context.sent[crossed.edge.n] = None
            if context is not None and len(context.sent) > context.prune_at:
                context.prune(edges)
        except BaseException:
            self.withdraw(left)
            raise
        return left

    def attach_recv(
        self,
        id: ContextId | None,
        peer: WorkerId,
        crossings: Sequence[Crossing],
        tensors: list[torch.Tensor],
    ) -> bool:
        """Replace tensors that crossed by outputs of Recvs; False if no graph is recorded here."""
        context = None if id is None else self.contexts.maybe(id) or self._maybe_open(id, peer)
        if context is None and self.only_in_contexts:
            self.drop_crossings(crossings, peer)
            return False
        tag, most = context and context.id, self.limits.edges
        for crossed in crossings:
            check_crossing(crossed, peer, tensors, most)
            recv = arrive(self.edges, self._ref, tag, peer, crossed, tensors)
            if context is not None:
                context.received[crossed.edge] = None
                if self.only_in_contexts:
                    context.kept.append(recv)
        if context is not None and len(context.received) > context.prune_at:
            context.prune(self.edges)
        self.releases.expect()
        return True

    def _maybe_open(self, id: ContextId, source: WorkerId | None = None) -> Context | None:
        """The context; None if it is closed: then the new edges belong to no context."""
        context = self.contexts.heard_of(id, source)
        if context is None and self.only_in_contexts and self.contexts.lost_with(id) is not None:
            self.contexts.find(id)  # raises: to go on without it would cut the graph
        return context

    def withdraw(self, crossings: Sequence[Crossing]) -> None:
        """The message did not leave: forget its crossings."""
        self.edges.withdraw([crossed.edge for crossed in crossings])

    def drop_crossings(self, crossings: Sequence[Crossing], sender: WorkerId) -> None:
        """A message is dropped unread: release its edges."""
        self.edges.unseen([crossed.edge for crossed in crossings], sender)
        self.releases.expect()

    # -- backward: what the nodes call

    def wait_for_gradients(self, end: EdgeEnd) -> Sequence[torch.Tensor | None]:
        """Called by a Send: wait until its edge is settled, and take its gradients."""
        active, edge = self.passes.of_run(current_run()) or self._begin_native(end), end.edge
        if isinstance(active, CoordinatedPass):
            self.coordinator.about_to_wait(active)
        began = 0.0 if (record := self._agent.events.record) is None else self._agent.clock.now()
        if not active.has_come(edge):
            check_order(self.edges, end, active.edges_sent)
            has_come = partial(active.has_come, edge)
            self._agent.wait(end.peer, has_come, partial(active.await_edge, edge))
        message, payload, _ = active.take_gradients(edge)
        if record is not None:
            record("settled", began, edge, end.peer, active.id)
        try:
            present = self._decode_gradients(active, message, payload, end)
            if message.crossings:
                self.attach_recv(end.context, end.peer, message.crossings, present)
        except BaseException:
            # Decoding has given back the blocks of its tensors.
            self.drop_crossings(message.crossings, end.peer)
            raise
        if len(present) == len(message.present):
            return present
        came = iter(present)
        return [next(came) if is_there else None for is_there in message.present]

    def _decode_gradients(
        self, active: AnyPass, message: Gradients, payload: Payload, end: EdgeEnd
    ) -> list[torch.Tensor]:
        headers, homes = message.tensors, end.homes
        try:
            if message.present.count(True) != len(headers):
                raise BadMessage("another number of tensors came than was said")
            if homes is None and arrive_on_cpu(headers):
                return decode_tensors(headers, payload, self.limits)
            homes = homes or (ON_CPU,) * len(message.present)
            theirs = zip(homes, message.present, strict=True)
            present = [home for home, is_there in theirs if is_there]
            return self.devices.decode_at(headers, payload, end.peer, present)
        except (GradwireError, ValueError) as error:
            bad = BadMessage(f"the gradients of {message.edge} do not decode: {error}")
            active.fail(bad)
            raise bad from error

    def send_gradients(
        self, recv: Node, end: EdgeEnd, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Called by a Recv: send the gradients of its edge, unless nothing behind it is needed.

        `backward(inputs=[received])` runs the Recv only so that its tensor gets a gradient. If the
        last gradients of a participant go to the coordinator, they are sent after the engine has
        returned, and also serve as RunDone. Under create_graph a gradient gets an edge of its own.
        """
        active = self.passes.of_run(current_run()) or self._begin_native(end)
        edge, peer = end.edge, end.peer
        active.edges_sent.add(edge)
        if active.is_partial and not leads_on(recv):
            return
        if not self.edges.is_alive(edge):
            raise self._gone(end)
        present = list(filter(_is_there, gradients))
        grad = torch.is_grad_enabled()
        crossings = self.attach_send(end.context, peer, present) if grad else []
        try:
            if are_on_cpu(present):
                headers, payload = encode_tensors(present, self.limits)
            else:
                headers, payload = self.devices.encode(present, peer, active.deadline)
        except BaseException as error:
            self.withdraw(crossings)
            if any(map(is_batched, present)):
                raise _batched(edge) from error
            raise
        there = list(map(_is_there, gradients))
        message = Gradients(active.id, edge, there, headers, crossings)
        began = 0.0 if (record := self._agent.events.record) is None else self._agent.clock.now()
        try:
            if isinstance(active, CoordinatedPass):
                self.coordinator.send(active, peer, message, payload)
            elif self._may_be_held(active, payload, peer):
                # Sent by Participant._tell_done. See Note [Gradients are never shared].
                active.held, record = (message, [*map(bytes, payload)]), None
            else:
                self._agent.tell(peer, message, payload, deadline=active.deadline, phase="backward")
            if record is not None:
                record("gradients", began, edge, peer, headers, sum(map(len, payload)))
        except BaseException:
            self.passes.withdraw(message, peer)
            raise

    def _may_be_held(
        self, active: ParticipantPass, payload: Sequence[Buffer], peer: WorkerId
    ) -> bool:
        """Whether these gradients of a participant may wait for the end of its run."""
        is_last = active.is_last()  # counts the Recvs: it must be asked for each
        return is_last and peer == active.id.worker and sum(map(len, payload)) <= _HELD_BYTES

    def _begin_native(self, end: EdgeEnd) -> AnyPass:
        """See Note [Which pass a node runs for], backward/pass_table.py."""
        if not this_thread.is_ordered:
            # It was not started by Python code, so its failure is not seen either: the next run
            # looks for tasks that it has left.
            this_thread.has_leftovers = True
        if end.count and not self.edges.is_alive(end.edge):
            raise self._gone(end)
        return self.coordinator.begin_native(end)

    def _gone(self, end: EdgeEnd) -> Exception:
        """Why a Recv leads nowhere: its context is closed, or its sender was lost."""
        if end.context is not None:
            self.contexts.find(end.context)
        name = self._agent.directory.name(end.peer)
        return PeerLost(
            f"{end.edge} came from {name}, which was lost since",
            hint="compute what depends on it again",
        ).about(name, phase="backward")

    def _serve_gradients(self, message: Gradients, payload: Payload, source: Source) -> None:
        edge = message.edge
        is_there = check_gradients(self.edges, edge, source.worker)
        pass_id, passes = message.pass_id, self.passes
        try:
            active = passes.maybe(pass_id) or passes.heard_of(pass_id) if is_there else None
        except OverLimit:
            passes.drop(message, source.worker)
            raise
        if active is None:
            passes.drop(message, source.worker)
            self._agent.events.note("late", edge, source.worker)
            self._agent.noting.came_late(source.worker)
            return
        if edge in active.settled and active.error is None:
            name = self._agent.directory.name(source.worker)
            twice = BadMessage(f"{edge} was settled twice in {active.id} by {name}")
            active.fail(twice.about(name, phase="backward"))
            passes.drop(message, source.worker)
            return
        passes.settle(active, message, payload, source.worker)
        if message.last:
            active.worker_done(source.worker, has_changed=message.has_changed)

    def live_edges(self) -> list[LiveEdge]:
        """What holds graphs here, oldest first."""
        now, found = self._agent.clock.now(), []
        for sent in sorted(self.edges.sent.copy().values(), key=lambda sent: sent.made_at):
            to, line = self._agent.directory.name(sent.peer), spoken_line(sent.line) or "a result"
            found.append(LiveEdge(str(sent.edge), to, now - sent.made_at, sent.bytes, line))
        return found

    def report_leaks(self) -> None:
        """All programs are over: warn of edges that others have held for long, as by a cycle."""
        old = [edge for edge in self.live_edges() if edge.age > _LONG_SECONDS]
        if old:
            _log.log(
                logging.WARNING if len(old) >= _MANY else logging.INFO,
                "%s shuts down with %d edges that other workers have held for over %g s: see "
                "gradwire.live_edges(). The oldest is %s to %s, %.0f s old, of %d bytes, from %s",
                *(self._agent.directory.me.name, len(old), _LONG_SECONDS, *old[0]),
            )

    def stop(self, reason: str) -> None:
        """This worker shuts down: fail its passes, which wakes waiting threads; close contexts."""
        for active in self.passes.all():
            active.fail(PeerLost(reason))
            self.passes.over(active)
            if isinstance(active, ParticipantPass) and active.undo_log and active.wait_for_run(0):
                # It will not be known here how the pass ended: its changes stay.
                active.undo_log.keep(lambda _: None)
        for id in self.contexts.all():
            self.contexts.close(id)
        self.edges.clear()
        self.releases.stop()

    # -- the life of a context

    def calling(self, id: ContextId | None, peer: WorkerId) -> ContextId | None:
        """The context of a call to this peer; None if it is closed, or the peer would reopen it."""
        if id is None:
            return None
        context = self.contexts.maybe(id) or self.contexts.heard_of(id)
        if context is None:
            return None
        context.called.add(peer)
        return id

    def works_in(self, id: ContextId, source: Source) -> None:
        """A peer's call is about to run in this context, unless that peer is lost by now."""
        self.contexts.heard_of(id, source.worker)
        try:
            self._agent.check_asker(source)
        except PeerLost:  # its loss may have been handled before the context was added
            self._forgetting.ask(id)
            raise

    def _register(self, id: ContextId) -> None:
        self._agent.dispatch.service.submit(partial(self._forgetting.ask, id))

    def called(self, id: ContextId | None, peer: WorkerId) -> None:
        """The call has left. If its context was closed meanwhile, tell the peer."""
        if id is not None and self.contexts.maybe(id) is None and opener_of(id) == self._me:
            self._forgetting.tell(peer, id)

    def close(self, id: ContextId, lost: str | None = None) -> None:
        """Drop a context here, because `lost` was lost if set; the opener tells all it called."""
        context = self.contexts.close(id, lost)
        if context is None:
            return
        sent = tuple(context.sent)
        dropped = self.edges.release_early(sent, tuple(context.received))
        self.releases.expect()
        passes = self.passes.all() if len(self.passes) else []
        released = union([one(EdgeId(self._me, n)) for n in sent]) if passes else {}
        for active in passes:
            if active.context is not context and not meets(active.mine, released):
                continue
            why = "" if lost is None else f", as {lost} was lost"
            here = self._agent.directory.me.name
            active.fail(ContextClosed(f"{context} was closed on {here}{why}"))
            # A pass whose run has begun stays: the run, or the coordinator, ends it. Until then the
            # nodes of the run find the pass, and raise its error.
            if not isinstance(active, CoordinatedPass) and active.undo_log is None:
                self.passes.over(active)
        del dropped
        if opener_of(id) == self._me:
            for worker in context.called - {self._me}:
                self._forgetting.tell(worker, id)

    def _peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        """Drop only the contexts that exist now: a peer that comes back may open new ones."""
        self.passes.peer_lost(worker, error)
        known = [id for id in self.contexts.all() if opener_of(id) == worker]
        settle, dropped = self._participant.coordinator_lost(worker), self.edges.peer_lost(worker)

        def forget() -> None:
            dropped.clear()
            for id in known:
                self.close(id, lost=self._agent.directory.name(worker))
            settle()

        self._agent.dispatch.service.submit(forget)


def _batched(edge: EdgeId) -> NotSerializable:
    return NotSerializable(
        f"the gradients of {edge} are batched by vmap, which does not cross workers",
        hint="differentiate row by row: without is_grads_batched=True or vectorize=True",
    )
