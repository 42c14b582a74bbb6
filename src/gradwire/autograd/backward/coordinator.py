"""Where a pass begins and ends: the worker whose backward met the first crossing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import torch

from gradwire.agent.agent import Agent
from gradwire.agent.remote_errors import fresh
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.anomaly import current_mode
from gradwire.autograd.backward import engine_run
from gradwire.autograd.backward.active_pass import NO_STOPS, ActivePass, Plan
from gradwire.autograd.backward.inner_backward import watch_backwards
from gradwire.autograd.backward.pass_table import PassTable
from gradwire.autograd.backward.reach import (
    accumulator,
    plain_destination,
    sends_executed,
    stops_of,
)
from gradwire.autograd.backward.rollback import Ending
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.lineage import Lineage, bits_to_wire, union
from gradwire.autograd.graph.ordering import runs_through
from gradwire.autograd.graph.validate import check_asked
from gradwire.autograd.messages import (
    NOWHERE,
    TO_MAP,
    Gradients,
    HasEnded,
    PassEnded,
    QueryPass,
    RunDone,
    RunFailed,
    Start,
)
from gradwire.autograd.profiling import span
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.autograd.undo.nested_pass import Nested, Outcomes, inside_now
from gradwire.autograd.undo.undo_log import UndoLog, ledger_of_run
from gradwire.errors import GradwireError, PeerLost, UsageError
from gradwire.ids import EdgeId, WorkerId
from gradwire.options import DEFAULT, Timeout
from gradwire.torch_private import (
    current_run,
    is_profiled,
    keeps_graph,
    when_run_ends,
    will_execute,
)
from gradwire.wire.frame import Buffer

_END_SECONDS = 10.0
"""How long a pass that has failed before its deadline waits until a worker has put it back."""
_END_LATE_SECONDS = 1.5
"""The same for one that was lost, which may be back already; and for the next pass."""
_GRACE_SECONDS = 0.01
"""The same after the deadline: enough for those who answer at once."""


@final
class Root:
    """Begins passes on this worker and sees them through."""

    def __init__(
        self,
        agent: Agent,
        passes: PassTable,
        locks: LeafLocks,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._agent, self._passes, self._locks, self._waiting = agent, passes, locks, waiting
        self._me = agent.directory.me.id
        watch_backwards()
        agent.handle(RunDone, self._serve_done, Lane.CONTROL)
        agent.handle(RunFailed, self._serve_failed, Lane.CONTROL)
        agent.handle(QueryPass, self._serve_how_ended, Lane.SERVICE)
        agent.kinds.add(HasEnded)
        self._outcomes = Outcomes()

    def begin_native(self, context: Context, met: EdgeId) -> ActivePass:
        """A backward of the user's has met its first crossing of this context.

        That one is executed whatever the engine says of it: the node that a backward begins with is
        not among those it tells of.
        """
        self._check_whole(context)
        reached = [
            received
            for received in tuple(context.received)
            if received.edge == met or runs_through(received)
        ]
        plain = any(will_execute(accumulator(received)) for received in reached)
        needed, stops = None, NO_STOPS
        if not plain:
            needed, stops = sends_executed(context), stops_of(context, met)
            reached = [received for received in reached if received.edge not in stops]
        lineage = union([received.lineage for received in reached])
        destination = plain_destination(context) if plain else NOWHERE
        create_graph = torch.is_grad_enabled()
        keep = keeps_graph()
        running = self._begin(context, lineage, needed, destination, keep, create_graph)
        running.stops, running.around = stops, ledger_of_run() or inside_now()
        return running

    def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        *,
        retain_graph: bool,
        timeout: Timeout = DEFAULT,
    ) -> None:
        """Differentiate the roots into the context's map, on every worker."""
        self._check_whole(context, timeout)
        undo_log = UndoLog(self._locks, context.gradients)
        context.walk.origin([root.grad_fn for root in roots])
        landmarks = context.walk.landmarks()

        def enter() -> None:
            lineages = [r.lineage for r in tuple(context.received) if will_execute(r.node)]
            self._begin(context, union(lineages), None, TO_MAP, retain_graph, False, timeout)

        try:
            engine_run.accumulate(
                tuple(roots),
                tuple([torch.ones_like(root) for root in roots]),
                undo_log,
                landmarks,
                enter,
                retain_graph=retain_graph,
                span=span("gradwire backward of %s", context) if is_profiled() else None,
            )
        except BaseException:
            undo_log.undo()
            raise
        undo_log.keep()

    def _begin(
        self,
        context: Context,
        edges: Lineage,
        needed: int | None,
        destination: int,
        retain_graph: bool,
        create_graph: bool,
        timeout: Timeout = DEFAULT,
    ) -> ActivePass:
        """Every worker that owns a Send of the pass takes part.

        Note [Starts leave with gradients]: they are told when the first gradients leave, and one
        whose gradients these are hears both at once. Before that nobody could do anything. They are
        told at the latest when this worker waits.
        """
        owners = sorted(edges)
        mine = edges.get(self._me, 0)
        if mine:
            owners.remove(self._me)
        anomaly = current_mode()
        modes = (anomaly, engine_run.lets_checkpoints_run())
        plan = Plan(edges, needed, destination, retain_graph, create_graph, owners, *modes)
        running = self._passes.begin(context, current_run(), plan, timeout)
        when_run_ends(_Finish(self, running))
        running.mine = mine if needed is None else mine & needed
        if self._agent.events.are_heard:
            self._agent.events.emit("start", running.id)
        return running

    def send(
        self, running: ActivePass, peer: WorkerId, gradients: Gradients, payload: Sequence[Buffer]
    ) -> None:
        """Gradients leave. See Note [Starts leave with gradients]."""
        untold = running.take_untold()
        left = running.deadline - self._agent.clock.now()
        said = _start(running, peer, left, gradients) if peer in untold else gradients
        self._agent.tell(peer, said, payload, deadline=running.deadline, phase="backward")
        if untold:
            self._tell(running, [worker for worker in untold if worker != peer])

    def send_starts(self, running: ActivePass) -> None:
        """This worker is about to wait: whoever has not been told to run is told now."""
        if running.untold:
            self._tell(running, running.take_untold())

    def _tell(self, running: ActivePass, workers: Sequence[WorkerId]) -> None:
        for worker in workers:
            left = running.deadline - self._agent.clock.now()
            start = _start(running, worker, left)
            self._agent.tell(worker, start, deadline=running.deadline, phase="backward")

    def finish(self, running: ActivePass) -> None:
        """The engine is through here: wait for the others, then let them keep what they have."""
        try:
            self.send_starts(running)
            for worker in running.unfinished():  # each by its own channel, which it reads itself
                self._agent.wait(
                    worker,
                    partial(running.is_through, worker),
                    partial(running.await_worker, worker),
                )
            if running.error is not None:
                raise fresh(running.error)
            running.check_collected()
        except BaseException as error:  # also an interrupt: the others must not wait for us
            self.give_up(running, error if isinstance(error, Exception) else None)
            raise
        self._passes.over(running)
        if running.around is None or not running.changed_workers():
            self._end_well(running)
        else:
            self._outcomes.put_off(running.id.n)
            end_well, give_up = partial(self._end_well, running), partial(self._take_back, running)
            running.around.nested.append(Nested(end_well, give_up))

    def _take_back(self, running: ActivePass) -> bool:
        """A pass had ended well, the backward around it has not."""
        self.give_up(running, None)
        self._outcomes.decide(running.id.n, well=False)
        return running.context.broken is None

    def _end_well(self, running: ActivePass) -> None:
        self._outcomes.decide(running.id.n, well=True)
        for worker in running.changed_workers():
            ended = PassEnded(running.context.id, running.id, None)
            try:
                self._agent.tell(worker, ended, deadline=running.deadline)
            except GradwireError:  # it asks, when it can; see Served.root_lost
                self._agent.events.emit("unended", running.id, self._agent.directory.name(worker))
        if self._agent.events.are_heard:
            self._agent.events.emit("end", running.id)

    def give_up(self, running: ActivePass, error: Exception | None) -> None:
        """End a failed pass everywhere, and wait until it has left nothing behind."""
        me = self._agent.directory.me.name
        told = (
            error
            or running.error
            or PeerLost(f"the backward that began {running.id} on {me} raised")
        )
        running.fail(told)
        self._passes.over(running)
        ending = Ending(self._agent, running.context, running.id, running.asked)
        ending.begin(self._agent.describe(told))
        deadline = max(running.deadline, self._agent.clock.now() + _GRACE_SECONDS)
        with self._waiting():
            silent = ending.wait(deadline, _END_SECONDS, _END_LATE_SECONDS)
        self._agent.events.emit("fail", running.id)
        for remark in ending.remarks:
            told.add_note(remark)
        if silent:
            told.add_note(
                f"{silent} has not confirmed that {running.id} was put back: until then "
                f"{running.context} cannot be differentiated again"
            )

    def _check_whole(self, context: Context, timeout: Timeout = DEFAULT) -> None:
        """Whether another pass may begin. What an earlier one has changed is waited for a while."""
        for pass_id, ending in list(context.endings.items()):
            with self._waiting():
                silent = ending.wait(
                    self._passes.due(timeout), _END_LATE_SECONDS, _END_LATE_SECONDS
                )
            if silent:
                raise UsageError(
                    f"{context} cannot be differentiated until {silent} confirms that {pass_id} "
                    "was put back",
                    hint="try again when it has answered, or close the context and begin again",
                )
        if context.broken is not None:
            raise UsageError(
                f"{context} cannot be differentiated any more: {context.broken}",
                hint="close the context and begin again",
            )

    def _serve_how_ended(self, message: QueryPass, _: Payload, source: Source) -> None:
        """While it runs it has not ended well, and cannot any more: it needed who asks.

        One inside another backward ends as that one does: until then there is no answer.
        """
        is_mine = message.pass_id.worker == self._me
        ended_well = is_mine and self._outcomes.of(message.pass_id.n, _END_SECONDS)
        if ended_well is None:
            return
        limit = self._agent.clock.now() + _END_SECONDS
        self._agent.answer(source, HasEnded(ended_well), deadline=limit)

    def _serve_done(self, message: RunDone, _: Payload, source: Source) -> None:
        running = self._passes.maybe(message.context, message.pass_id)
        if running is not None:
            running.worker_done(source.worker, has_changed=message.has_changed)
        else:
            self._agent.noting.came_late(source.worker)

    def _serve_failed(self, message: RunFailed, _: Payload, source: Source) -> None:
        running = self._passes.maybe(message.context, message.pass_id)
        if running is None:
            self._agent.noting.came_late(source.worker)
            return
        check_asked(running.id, running.asked, source.worker)
        running.fail(self._agent.revive(message.failure))


class _Finish:
    """What the engine calls when the run here is through.

    If the run fails it drops this object without calling it, which is how we learn that the
    others must be told.
    """

    __slots__ = ("_called", "_root", "_running")

    def __init__(self, root: Root, running: ActivePass) -> None:
        self._root, self._running = root, running
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._root.finish(self._running)

    def __del__(self) -> None:
        if not self._called:
            self._root.give_up(self._running, None)


def _start(
    running: ActivePass, worker: WorkerId, seconds: float, first: Gradients | None = None
) -> Start:
    plan = running.plan
    assert plan is not None, "only the root has told"
    return Start(
        running.context.id,
        running.id,
        bits_to_wire(plan.edges[worker]),
        None if plan.needed is None else bits_to_wire(plan.needed),
        plan.destination,
        plan.retain_graph,
        plan.create_graph,
        seconds,
        first,
        plan.anomaly,
        plan.checkpoints,
    )
