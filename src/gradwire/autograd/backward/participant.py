"""A participant of a pass: one engine run over this worker's Sends, for a coordinator elsewhere.

It runs when a Start arrives and answers RunDone. The undo log of its run is kept until it is known
how the pass ended (pass_ending.py).

Note [Who may start a run here]: the numbers of edges can be guessed, so any member can send a Start
for a graph in which it has no part. Its run would free the graph's saved tensors, or occupy a
thread while it waits for gradients that nobody sends. This worker cannot know everyone who takes
part: the peer to which it sent a tensor may have passed the result on. But the gradients of an edge
come only from the worker to which that edge leads. A Start that names only edges that lead to the
coordinator, and edges that these depend on, runs at once. Any other is deferred, without a thread,
until the first gradients of its pass arrive: before that a run could only wait. The coordinator may
send these first gradients itself, for an edge that leads to it, and name edges of others too. That
is harmless: the graph behind a Send runs only when the worker its edge leads to has sent gradients.
To wait for the gradients of every edge would be wrong: two workers that have used each other's
results would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import final

from msgspec.structs import replace

from gradwire.agent.agent import Agent
from gradwire.agent.remote_errors import fresh
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.autograd.backward import engine_run
from gradwire.autograd.backward.active_pass import ParticipantPass
from gradwire.autograd.backward.pass_ending import PassEnding, check_coordinator
from gradwire.autograd.backward.pass_table import PassTable
from gradwire.autograd.graph.context import Context, Contexts
from gradwire.autograd.graph.crossing import anchor_of, check_gradients, end_of
from gradwire.autograd.graph.edges import Edges, Sent
from gradwire.autograd.graph.lineage import from_wire, meets, minus, of_worker, one, union
from gradwire.autograd.messages import RunDone, Start
from gradwire.autograd.modes import in_modes
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.autograd.undo.undo_log import UndoLog
from gradwire.errors import BadMessage, ContextClosed, GradwireError, OverLimit, PeerLost
from gradwire.ids import ContextId, PassId, WorkerId
from gradwire.torch_private import NOTHING, is_recording, recording, span, will_execute
from gradwire.wire.message import Message

_NO_CHECKPOINTS = (
    "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an "
    "`inputs` parameter to .backward(), and with a backward inside of these"
)
Run = Callable[[], bool]
"""Takes part in a pass. True if the run was deferred; it then still occupies a slot of `_runs`."""


@final
class Participant:
    """Takes part in the passes that other workers coordinate."""

    def __init__(
        self,
        agent: Agent,
        contexts: Contexts,
        edges: Edges,
        passes: PassTable,
        locks: LeafLocks,
        inside: Callable[[ContextId | None], AbstractContextManager[None]],
        seconds: float,
    ) -> None:
        self._agent, self._contexts, self._edges, self._passes = agent, contexts, edges, passes
        self._locks, self._inside, self._seconds = locks, inside, seconds
        self._runs = PeerLimit("runs", agent.limits.runs)
        self._ending = PassEnding(agent, passes)
        self.coordinator_lost = self._ending.coordinator_lost
        agent.handle(Start, self._serve_start, Lane.SERVICE)

    def _serve_start(self, start: Start, payload: Payload, source: Source) -> None:
        check_coordinator(start.pass_id, source.worker)
        deadline = self.deadline(start.seconds)
        try:
            self._runs.take(source.worker)
        except OverLimit as error:
            self._drop_first(start)
            self._agent.noting.note(source.worker, error)
            self._tell_failed(start.pass_id, deadline, error)
            return
        begin = partial(self._begin, start, payload, source, deadline)
        self._attempt(start.pass_id, deadline, begin)

    def deadline(self, seconds: float) -> float:
        """The local deadline of a pass: the coordinator's timeout, capped by ours."""
        return self._agent.clock.now() + min(seconds, self._seconds)

    def _attempt(self, pass_id: PassId, deadline: float, run: Run) -> None:
        is_deferred = False
        try:
            is_deferred = run()
        except BaseException as error:  # an error ends the pass everywhere
            self._tell_failed(pass_id, deadline, error)
        finally:
            if not is_deferred:
                self._runs.give_back(pass_id.worker)

    def _begin(self, start: Start, payload: Payload, source: Source, deadline: float) -> bool:
        """Take part, now or later; True if later. See Note [Who may start a run here]."""
        coordinator, first, is_settled = source.worker, start.first, False
        try:
            active = self._maybe_started(start, source, deadline)
            if active is None:  # the pass failed before its Start arrived
                self._agent.noting.came_late(coordinator)
                return False
            if first is not None and check_gradients(self._edges, first.edge, coordinator):
                self._passes.settle(active, first, payload, coordinator)
                is_settled = True
        finally:
            if not is_settled:
                self._drop_first(start)
        sends = self._sends_of(active, start)
        if not active.has_news():
            direct = [sent.lineage for sent in sends if sent.peer == coordinator]
            if len(direct) < len(sends) and minus(active.mine, union(direct)):
                run = partial(self._take_part_and_tell, active, start, sends)
                attempt = partial(self._attempt, active.id, deadline, run)
                active.on_news(partial(self._agent.dispatch.service.submit, attempt))
                return True
        return self._take_part_and_tell(active, start, sends)

    def _maybe_started(
        self, start: Start, source: Source, deadline: float
    ) -> ParticipantPass | None:
        active = self._passes.heard_of(start.pass_id, deadline, start.floor)
        if active is None:
            return None
        assert isinstance(active, ParticipantPass), "its id names another worker"
        try:
            self._agent.check_asker(source)
        except PeerLost:  # handled before the pass was in the table, perhaps
            self._passes.over(active)
            raise
        # A second run would have an undo log of its own, which nobody would end.
        if not active.starts():
            raise BadMessage(f"{active.id} was begun twice")
        if start.context is not None:
            active.context = self._find(start.context, source.worker)
        self._ending.wait_while_in_doubt(active, deadline)
        return active

    def _drop_first(self, start: Start) -> None:
        if start.first is not None:
            self._passes.drop(start.first, start.pass_id.worker)

    def _sends_of(self, active: ParticipantPass, start: Start) -> list[Sent]:
        active.mine = of_worker(from_wire(start.edges), self._edges.me)
        sends = self._edges.sends_in(active.mine, (), self._agent.directory.name)
        if start.needed is not None:
            needed = from_wire(start.needed)
            sends = [sent for sent in sends if meets(sent.lineage, needed)]
            active.mine = union([one(sent.edge) for sent in sends])
        return sends

    def _find(self, context: ContextId, coordinator: WorkerId) -> Context:
        try:
            return self._contexts.heard_of(context, coordinator) or self._contexts.find(context)
        except ContextClosed:
            self._agent.noting.came_late(coordinator)
            raise

    def _take_part_and_tell(self, active: ParticipantPass, start: Start, sends: list[Sent]) -> bool:
        is_told = False
        try:
            try:
                self._take_part(active, start, sends)
            except BaseException:
                # The run is rolled back. Remove the pass now: the coordinator may never end it.
                self._passes.over(active)
                raise
            self._tell_done(active)
            is_told = True
        finally:
            if active.held is not None and not is_told:
                self._passes.withdraw(active.held[0], active.id.worker)
        return False

    def _tell_done(self, active: ParticipantPass) -> None:
        """Tell the coordinator. If the run has changed nothing, the pass is over here."""
        assert active.undo_log is not None, "its run is over"
        has_changed = active.undo_log.has_changed
        if not has_changed:
            self._passes.over(active)
        last, payload = active.held or (None, ())
        done: Message = RunDone(active.id, has_changed)
        if last is not None:
            done = replace(last, last=True, has_changed=has_changed)
        deadline, coordinator = active.deadline, active.id.worker
        if (record := self._agent.events.record) is not None:  # before: a trace may end with it
            now = self._agent.clock.now()
            if last is not None:
                size = sum(map(len, payload))
                record("gradients", now, last.edge, coordinator, last.tensors, size)
            record("done", now, active.id, coordinator)
        self._agent.tell(coordinator, done, payload, deadline=deadline, phase="backward")

    def _tell_failed(self, pass_id: PassId, deadline: float, error: BaseException) -> None:
        failed = RunDone(pass_id, False, self._agent.describe(error))
        try:
            self._agent.tell(pass_id.worker, failed, deadline=deadline, phase="backward")
        except GradwireError:
            self._agent.events.note("untold", pass_id, pass_id.worker)

    def _take_part(self, active: ParticipantPass, start: Start, sends: list[Sent]) -> None:
        undo_log = UndoLog(self._locks, active.context)
        undo_log.seconds_left = partial(active.seconds_left, self._agent.clock)
        active.run_begins(undo_log)
        began, first = 0.0, None
        if (record := self._agent.events.record) is not None:
            began, first = self._agent.clock.now(), next(iter(active.settled), None)
        try:
            with self._inside(start.context), NOTHING if is_recording() else recording():
                self._run(active, undo_log, start, sends)
            active.check_collected()
        except BaseException as error:
            undo_log.undo()
            if stays := undo_log.what_stays(self._agent.directory.me.name):
                error.add_note(stays)
            active.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        finally:
            # The pass may have failed on another thread meanwhile, and a rollback may wait for this
            # run to end. Both call `undo`; only the first call has an effect.
            has_failed = active.run_over()
            if has_failed:
                undo_log.undo()
            if record is not None:
                record("run", began, active.id, active.id.worker, first or "")
        if has_failed and active.error is not None:  # the coordinator must not take it for done
            raise fresh(active.error)

    def _run(
        self, active: ParticipantPass, undo_log: UndoLog, start: Start, sends: list[Sent]
    ) -> None:
        if not sends:
            return
        reached = engine_run.reached_from([sent.node for sent in sends])
        counted, anchors = reached.accumulators, None
        if start.needed is not None:
            needed = from_wire(start.needed)
            recvs = [r for r in reached.recvs if meets(end_of(r).origin.lineage, needed)]
            counted, anchors = [], tuple([anchor_of(recv).variable for recv in recvs])  # type: ignore[attr-defined]

        def on_start() -> None:
            self._passes.enter(active, undo_log.run)
            if not start.checkpoints and any(map(will_execute, reached.checkpoints)):
                raise RuntimeError(_NO_CHECKPOINTS)  # as torch does in one process
            if anchors is not None or engine_run.may_be_counted(reached):
                recvs = sum(map(will_execute, reached.recvs))
                active.run_counted(len(sends), recvs, sum(map(will_execute, counted)))

        mode: AbstractContextManager[object] = NOTHING
        if start.modes is not None:
            nodes = [sent.node for sent in sends]
            mode = in_modes(start.modes, nodes, self._agent.directory.me.name)
        with mode, span("gradwire backward %s", active):
            engine_run.execute(
                tuple([sent.token for sent in sends]),
                None,
                anchors,
                undo_log,
                reached if anchors is None else None,
                on_start,
                retain_graph=start.retain_graph,
                create_graph=start.create_graph,
                checkpoints=start.checkpoints,
            )
