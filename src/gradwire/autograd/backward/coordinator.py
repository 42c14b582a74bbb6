"""The coordinator of a pass: the worker on which the backward was called.

It tells the participants to run, waits for them at the end of its own run, and tells them whether
to keep or to revert what the pass has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch

from gradwire.agent.agent import Agent
from gradwire.agent.remote_errors import fresh
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.backward import engine_run
from gradwire.autograd.backward.active_pass import CoordinatedPass
from gradwire.autograd.backward.pass_ending import END_LATE_SECONDS, END_SECONDS, Rollback
from gradwire.autograd.backward.pass_table import PassTable
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.crossing import EdgeEnd, anchor_of, end_of
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.lineage import NOTHING, Lineage, by_worker, one, to_wire, union
from gradwire.autograd.messages import Gradients, HasEnded, PassEnded, QueryPass, RunDone, Start
from gradwire.autograd.modes import current_modes
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.autograd.undo.nested_pass import EndOfRun, Nested, Outcomes, inside_now
from gradwire.autograd.undo.undo_log import UndoLog, undo_log_of_run
from gradwire.errors import BadMessage, DeadlinePassed, GradwireError, PeerLost, UsageError
from gradwire.ids import PassId, WorkerId
from gradwire.options import DEFAULT, Timeout
from gradwire.torch_private import (
    Node,
    current_run,
    has_modes,
    keeps_graph,
    span,
    will_execute,
)
from gradwire.wire.message import Buffer

_GRACE_SECONDS = 0.01
"""How long to wait for a rollback if the deadline has passed: enough for an answer in flight."""


@final
class Coordinator:
    """Begins passes on this worker and ends them."""

    def __init__(self, agent: Agent, edges: Edges, passes: PassTable, locks: LeafLocks) -> None:
        self._agent, self._edges, self._passes, self._locks = agent, edges, passes, locks
        self._rollbacks: dict[PassId, Rollback] = {}
        """of failed passes that some participant has not confirmed yet"""
        self._broken: dict[WorkerId, str] = {}
        """why the gradients on a worker are unknown: the next pass with it is refused"""
        self._me = agent.directory.me.id
        engine_run.watch_backwards()
        agent.handle(RunDone, self._serve_done, Lane.CONTROL)
        agent.handle(QueryPass, self._serve_query, Lane.SERVICE)
        agent.kinds.add(HasEnded)
        self._outcomes = Outcomes()
        self.ended = self.failed = 0
        """how many passes that began here have ended well, and how many have not"""

    def begin_native(self, met: EdgeEnd) -> CoordinatedPass:
        """Begin the pass of a `loss.backward()` or `grad()` that has reached its first Recv."""
        executed = self._executed(engine_run.this_thread.recvs, met)
        if not executed:  # the run was not begun by Python code
            executed = self._executed(self._edges.recvs(), met)
        lineages, plain = [], False
        for recv in executed:
            if engine_run.leads_on(recv):
                lineages.append(end_of(recv).origin.lineage)
                # Whether it accumulates into leaves; otherwise it is a grad() or has `inputs=`.
                plain = plain or will_execute(anchor_of(recv))
        # A Function may run it inside of a `backward(context, …)`: then into the map of that one.
        undo_log = undo_log_of_run()
        into = undo_log.context if plain and undo_log is not None else None
        active = self._begin(into, union(lineages), is_partial=not plain)
        active.outer = undo_log.nested if undo_log else inside_now()
        return active

    def _executed(self, recvs: Sequence[Node], met: EdgeEnd) -> list[Node]:
        """Those of this worker that the current run executes; none if `met` is not among them."""
        executed, is_met = [], False
        for recv in recvs:
            end = end_of(recv)
            if end.engine_ref is not met.engine_ref:
                continue
            if end.edge == met.edge:  # `will_execute` is false for the root node of a backward
                is_met = True
                executed.append(recv)
            elif will_execute(recv):
                executed.append(recv)
        return executed if is_met else []

    def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool,
        timeout: Timeout = DEFAULT,
    ) -> None:
        """Differentiate the roots into the context's map, on every worker."""
        undo_log = UndoLog(self._locks, context)
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        recvs, leaves = engine_run.number_nodes(nodes)
        if engine_run.may_have_ddp():
            reached = engine_run.reached_from(nodes)
        else:
            reached = engine_run.Reached(recvs, leaves, [], [])

        def watch_rest() -> None:
            rest = engine_run.reached_from(engine_run.behind(recvs)).accumulators
            undo_log.watch(set(rest).difference(reached.accumulators))

        def on_start() -> None:  # the lineages of these contain those of the Recvs behind them
            lineages = [end_of(recv).origin.lineage for recv in recvs]
            active = self._begin(context, union(lineages), timeout)
            active.watch_rest = watch_rest
            undo_log.seconds_left = partial(active.seconds_left, self._agent.clock)

        try:
            with span("gradwire backward of %s", context):
                ones = tuple([torch.ones_like(root) for root in roots])
                engine_run.execute(
                    tuple(roots), ones, None, undo_log, reached, on_start, retain_graph=retain_graph
                )
        except BaseException:
            undo_log.undo()
            raise
        undo_log.keep()

    def _begin(
        self,
        context: Context | None,
        edges: Lineage,
        timeout: Timeout = DEFAULT,
        *,
        is_partial: bool = False,
    ) -> CoordinatedPass:
        """Begin a pass over these edges; the other workers that own a Send among them take part.

        Note [Starts are sent with gradients]: Starts are sent with the first gradients, because a
        participant can do nothing before. The receiver of these gradients gets both in one message.
        The Starts are sent at the latest when this worker begins to wait.
        """
        theirs, needed = by_worker(edges), None
        mine = theirs.pop(self._me, NOTHING)
        try:
            sends = self._edges.sends_in(mine, theirs, self._agent.directory.name)
        except PeerLost as lost:
            self._agent.with_story(lost)
            raise
        if is_partial:
            mine = union([one(sent.edge) for sent in sends if will_execute(sent.node)])
            needed = to_wire(mine)
        active = self._passes.begin(context, current_run(), theirs, timeout)
        EndOfRun(partial(self.finish, active), partial(self.give_up, active, None))
        if self._rollbacks or self._broken:
            self._check_participants(active)
        active.mine, active.is_partial = mine, is_partial
        active.start = partial(
            Start,
            active.id,
            self._passes.floor,
            None if context is None else context.id,
            needed=needed,
            retain_graph=keeps_graph(),
            create_graph=torch.is_grad_enabled(),
            modes=current_modes() if has_modes() else None,
            checkpoints=engine_run.lets_checkpoints_run(),
        )
        if context is not None:
            context.called.update(active.participants)  # they hear when it is closed
        self._note_begin(active)
        return active

    def _note_begin(self, active: CoordinatedPass) -> None:
        if (record := self._agent.events.record) is not None:
            record("start", self._agent.clock.now(), active.id)
        if (observer := self._agent.events.observer) is not None:
            observer.pass_began(active)

    def send(
        self,
        active: CoordinatedPass,
        peer: WorkerId,
        gradients: Gradients,
        payload: Sequence[Buffer],
    ) -> None:
        """Send gradients, and Starts. See Note [Starts are sent with gradients]."""
        not_started = active.take_not_started() if active.not_started else ()
        message = self._start(active, peer, gradients) if peer in not_started else gradients
        if peer in not_started and (record := self._agent.events.record) is not None:
            record("begin", self._agent.clock.now(), active.id, peer)
        self._agent.tell(peer, message, payload, deadline=active.deadline, phase="backward")
        for worker in not_started:
            if worker != peer:
                self._send_start(active, worker)

    def about_to_wait(self, active: CoordinatedPass) -> None:
        """A Send waits, or the run is over: send the Starts that were not sent."""
        if active.not_started:
            for worker in active.take_not_started():
                self._send_start(active, worker)
        if active.watch_rest is not None:
            watch, active.watch_rest = active.watch_rest, None
            watch()

    def _send_start(self, active: CoordinatedPass, worker: WorkerId) -> None:
        start = self._start(active, worker, None)
        if (record := self._agent.events.record) is not None:
            record("begin", self._agent.clock.now(), active.id, worker)
        self._agent.tell(worker, start, deadline=active.deadline, phase="backward")

    def _start(self, active: CoordinatedPass, worker: WorkerId, first: Gradients | None) -> Start:
        edges, left = to_wire(active.edges[worker]), active.deadline - self._agent.clock.now()
        return active.start(edges=edges, seconds=left, first=first)

    def finish(self, active: CoordinatedPass) -> None:
        """The run here is over: wait for the participants, then let them keep their changes."""
        active.is_finishing = True
        try:
            if active.not_started:
                self.about_to_wait(active)
            for worker in active.unfinished():
                self._await_end(active, worker)
            if active.error is not None:
                raise fresh(active.error)
            active.check_collected()
        except BaseException as error:  # an interrupt too: the participants must not wait for us
            self.give_up(active, error if isinstance(error, Exception) else None)
            raise
        self._passes.over(active)
        if active.outer is None or not active.changed:
            self._end_well(active)
        else:
            self._outcomes.defer(active.id.n)
            end_well, give_up = partial(self._end_well, active), partial(self._take_back, active)
            active.outer.append(Nested(end_well, give_up))

    def _await_end(self, active: CoordinatedPass, worker: WorkerId) -> None:
        """Wait until a participant is through, on its channel, so that this thread can read it."""
        began = 0.0 if (record := self._agent.events.record) is None else self._agent.clock.now()
        is_through = partial(active.is_through, worker)
        self._agent.wait(worker, is_through, partial(active.sleep_until, is_through))
        if record is not None:
            record("awaited", began, active.id, worker)

    def _take_back(self, active: CoordinatedPass) -> bool:
        """Revert a pass that succeeded, because the outer backward has failed."""
        self.give_up(active, None)
        self._outcomes.decide(active.id.n, well=False)
        return not any(worker in self._broken for worker in active.participants)

    def _end_well(self, active: CoordinatedPass) -> None:
        self._outcomes.decide(active.id.n, well=True)
        self.ended += 1
        if (observer := self._agent.events.observer) is not None:
            observer.pass_ended(active, None)
        for worker in sorted(active.changed):
            ended = PassEnded(active.id, None)
            try:
                self._agent.tell(worker, ended, deadline=active.deadline)
            except GradwireError:  # it asks later, see PassEnding.coordinator_lost
                self._agent.events.note("unended", active.id, worker)
        if (record := self._agent.events.record) is not None:
            record("end", self._agent.clock.now(), active.id)

    def give_up(self, active: CoordinatedPass, error: Exception | None) -> None:
        """End a failed pass on every worker, and wait until its changes are reverted."""
        me = self._agent.directory.me.name
        raised = PeerLost(f"the backward that began {active.id} on {me} raised")
        told = error or active.error or raised
        active.fail(told)
        self.failed += 1
        if (observer := self._agent.events.observer) is not None:
            observer.pass_ended(active, told)
        self._passes.over(active)
        # Nobody has heard of a pass that failed before its Starts were sent.
        workers = () if active.not_started else active.participants
        failure = self._agent.describe(told)
        rollback = Rollback(self._agent, self._rollbacks, self._broken, active.id, workers, failure)
        deadline = max(active.deadline, self._agent.clock.now() + _GRACE_SECONDS)
        silent = rollback.wait(deadline, END_SECONDS)
        if isinstance(error or active.error, PeerLost | DeadlinePassed):
            self._agent.with_story(told)
        self._agent.events.note("fail", active.id, None, f"{type(told).__name__}: {told}")
        for remark in rollback.remarks:
            told.add_note(remark)
        if silent:
            told.add_note(
                f"{silent} has not confirmed that {active.id} was rolled back: until then no other "
                "pass can run there"
            )

    def _check_participants(self, active: CoordinatedPass) -> None:
        """Wait briefly for the rollbacks of earlier passes on the workers of this one.

        It could add to gradients that are about to be reverted: UsageError if one is unfinished.
        One that is over without having reverted all of it is reported once, by an error here.
        """
        for worker in active.participants:
            broken = self._broken.pop(worker, None)
            if broken is not None:
                raise UsageError(
                    f"{active} was not begun: {broken}",
                    hint="zero the gradients there; then the next pass is begun again",
                )
        for pass_id, rollback in list(self._rollbacks.items()):
            if active.participants.isdisjoint(rollback.late()):
                continue
            silent = rollback.wait(active.deadline, END_LATE_SECONDS)
            if silent:
                raise UsageError(
                    f"{active} cannot begin until {silent} confirms that {pass_id} was rolled back",
                    hint="try again when it has answered",
                )

    def _serve_query(self, message: QueryPass, _: Payload, source: Source) -> None:
        """Answer a participant that has lost its connection to us: did the pass end well?

        A running pass must fail, because it needs the participant that asks. A nested pass shares
        the outcome of the outer backward; there is no answer before that.
        """
        is_mine = message.pass_id.worker == self._me
        ended_well = is_mine and self._outcomes.of(message.pass_id.n, END_SECONDS)
        if ended_well is None:
            return
        limit = self._agent.clock.now() + END_SECONDS
        self._agent.answer(source, HasEnded(ended_well), deadline=limit)

    def _serve_done(self, message: RunDone, _: Payload, source: Source) -> None:
        active = self._passes.maybe(message.pass_id)
        if active is None:
            self._agent.noting.came_late(source.worker)
        elif message.failure is None:
            active.worker_done(source.worker, has_changed=message.has_changed)
        elif source.worker in active.participants:
            active.fail(self._agent.revive(message.failure))
        else:
            raise BadMessage(
                f"w{source.worker} fails {active.id}, in which it was not asked to run"
            )
