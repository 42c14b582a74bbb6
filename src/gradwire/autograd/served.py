"""A worker's part in a pass that began elsewhere: one engine run over its Sends, then Done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import torch.distributed as dist
from msgspec.structs import replace

from gradwire.agent.agent import Agent, Answer
from gradwire.agent.dispatch import Lane, Payload
from gradwire.agent.errands import Source
from gradwire.agent.messages import Done, Failure
from gradwire.agent.pool import Job
from gradwire.agent.promise import Promise
from gradwire.autograd import run
from gradwire.autograd.checking import check_gradients, check_root
from gradwire.autograd.context import Context, Received, Sent
from gradwire.autograd.contexts import Contexts
from gradwire.autograd.graph import Landmarks
from gradwire.autograd.ledger import LeafLocks, Ledger
from gradwire.autograd.lineage import bits_from_wire, meets, numbers
from gradwire.autograd.messages import (
    NOWHERE,
    TO_MAP,
    HasEnded,
    HowEnded,
    PassEnded,
    RunDone,
    RunFailed,
    Start,
)
from gradwire.autograd.passes import Passes
from gradwire.autograd.profiling import span
from gradwire.autograd.running import Running
from gradwire.autograd.torch_private import (
    current_run,
    is_profiled,
    is_recording,
    recording,
    will_execute,
)
from gradwire.errors import BadMessage, ContextClosed, DeadlinePassed, GradwireError, PeerLost
from gradwire.ids import ContextId, WorkerId

_ANSWER_SECONDS = 10.0
_RUN_SECONDS = 60.0
_IN_DOUBT_SECONDS = 30.0
"""How long a root that cannot be reached is asked how its pass ended; then it is taken for dead."""
_FEW_LEAVES = 16
"""Their books are closed in less time than one more message takes."""
_REFUSALS = 3
_ASK_AGAIN_SECONDS = 0.05


@final
class Served:
    """Serves Start and the end of a pass."""

    def __init__(
        self,
        agent: Agent,
        contexts: Contexts,
        passes: Passes,
        locks: LeafLocks,
        inside: Callable[[ContextId], AbstractContextManager[None]],
    ) -> None:
        self._agent, self._contexts, self._passes = agent, contexts, passes
        self._locks, self._inside = locks, inside
        self._doubts: dict[WorkerId, list[Promise[None]]] = {}
        """the roots that were lost, until what their passes have changed is kept or put back"""
        agent.handle(Start, self._serve_start, Lane.SERVICE)
        agent.handle(PassEnded, self._serve_ended, Lane.CONTROL)

    def _serve_start(self, start: Start, payload: Payload, source: Source) -> None:
        check_root(start.pass_id, source.worker)
        limit = self._agent.clock.now() + start.seconds
        try:
            context = self._contexts.maybe(start.context) or self._find(start, source.worker)
            running = self._passes.heard_of(context, start.pass_id, limit)
            if running is None:  # it failed before it reached us
                self._agent.noting.came_late(source.worker)
                return
            try:
                self._agent.check_asker(source)
            except PeerLost:  # which may have been dealt with before the pass came to be
                self._passes.over(running)
                raise
            if self._doubts.get(source.worker):
                self._wait_while_in_doubt(source.worker, running, start.seconds)
            first = start.first
            if first is not None and check_gradients(context, first.edge, source.worker):
                running.settle_with(first, payload, self._agent.limits)
            self._take_part(running, start)
            self._tell_done(running, source.worker, limit)
        except BaseException as error:  # an error ends the pass everywhere
            self._tell_failed(start, source.worker, error, limit)

    def _wait_while_in_doubt(self, root: WorkerId, running: Running, seconds: float) -> None:
        """A root that was lost and is back may meet leaves that its last pass has changed."""
        for doubt in list(self._doubts[root]):
            try:
                doubt.wait(seconds)
            except TimeoutError:
                raise DeadlinePassed(f"an earlier pass than {running.id} is not over yet") from None

    def _find(self, start: Start, root: WorkerId) -> Context:
        try:
            return self._contexts.find(start.context)
        except ContextClosed:
            self._agent.noting.came_late(root)
            raise

    def _tell_done(self, running: Running, root: WorkerId, limit: float) -> None:
        """If nothing was changed here, the pass is over here too."""
        assert running.ledger is not None, "its run is over"
        has_changed = bool(running.ledger.entries)
        if not has_changed:
            self._passes.over(running)
        held = running.held
        if held is not None:
            last = replace(held.message, last=True, has_changed=has_changed)
            self._agent.tell(root, last, held.payload, deadline=limit, phase="backward")
            return
        done = RunDone(running.context.id, running.id, has_changed)
        self._agent.tell(root, done, deadline=limit, phase="backward")

    def _tell_failed(
        self, start: Start, root: WorkerId, error: BaseException, limit: float
    ) -> None:
        failed = RunFailed(start.context, start.pass_id, self._agent.describe(error))
        try:
            self._agent.tell(root, failed, deadline=limit, phase="backward")
        except GradwireError:
            self._agent.events.emit("untold", start.pass_id)

    def _take_part(self, running: Running, start: Start) -> None:
        into = running.context.gradients if start.destination == TO_MAP else None
        ledger = Ledger(self._locks, into)
        running.run_begins(ledger)
        if self._agent.events.are_heard:
            self._agent.events.emit("run", running.id)
        try:
            with self._inside(running.context.id):
                self._run(running, ledger, start)
            running.check_collected()
        except BaseException as error:
            ledger.undo()
            running.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        finally:
            if running.run_over():  # given up meanwhile, perhaps by those who put back
                ledger.undo()

    def _run(self, running: Running, ledger: Ledger, start: Start) -> None:
        if not is_recording():
            with recording():
                return self._run(running, ledger, start)
        sends, received, landmarks = _mine(running, start)
        if not sends:
            return None

        def enter() -> None:
            ledger.run = current_run()
            self._passes.enter(running, ledger.run)
            if received is not None:
                recvs = sum([will_execute(crossed.node) for crossed in received])
                leaves = sum(map(will_execute, counted))
                running.run_counted(len(sends), recvs, leaves)

        counted = () if start.destination == NOWHERE else landmarks.accumulators
        tokens = tuple([sent.token for sent in sends])
        retain, create = start.retain_graph, start.create_graph
        name = "gradwire backward %s of %s"
        named = span(name, running.id, running.context) if is_profiled() else None
        if start.destination == NOWHERE:
            anchors = tuple([r.anchor for r in received or ()])
            run.run_towards(
                anchors, tokens, enter, retain_graph=retain, create_graph=create, span=named
            )
        else:
            run.accumulate(
                tokens,
                None,
                ledger,
                landmarks,
                enter,
                retain_graph=retain,
                create_graph=create,
                span=named,
            )
        return None

    def root_lost(self, worker: WorkerId) -> Job:
        """What puts back what passes that began there have changed here, unless they ended well.

        A run that is over here may be one that ended well, and the word of it was lost with the
        connection. Where nobody listens any more there is nobody who could count on it. Until that
        is settled no pass of the same root begins here.
        """
        rooted = self._passes.rooted_at(worker)
        if not rooted:
            return lambda: None
        doubt: Promise[None] = Promise()
        self._doubts.setdefault(worker, []).append(doubt)
        return partial(self._settle, worker, rooted, doubt)

    def _settle(self, worker: WorkerId, rooted: list[Running], doubt: Promise[None]) -> None:
        try:
            for running in rooted:
                if running.wait_for_run(_RUN_SECONDS) and running.ledger is not None:
                    if self._ended_well(worker, running):
                        running.ledger.keep()
                    else:
                        running.ledger.undo()
                self._passes.over(running)
        finally:
            self._doubts[worker].remove(doubt)
            doubt.settle(None)

    def _ended_well(self, root: WorkerId, running: Running) -> bool:
        agent = self._agent
        limit = agent.clock.now() + _IN_DOUBT_SECONDS
        asked = HowEnded(running.context.id, running.id)
        refused = 0
        while agent.clock.now() < limit and refused < _REFUSALS:
            until = min(limit, agent.clock.now() + _ANSWER_SECONDS)
            try:
                _, promise = agent.request(root, asked, deadline=until, what=f"end of {running.id}")
                outcome = promise.wait()
            except DeadlinePassed:
                continue
            except GradwireError:  # nobody listens, or just not to us
                refused += 1
                threading.Event().wait(_ASK_AGAIN_SECONDS)
                continue
            if isinstance(outcome, Answer):
                return isinstance(outcome.message, HasEnded) and outcome.message.ended_well
        return False

    def _serve_ended(self, message: PassEnded, _: Payload, source: Source) -> None:
        """A good end is noted at once, before the root's next word, or its loss, can be heard."""
        check_root(message.pass_id, source.worker)
        if message.failure is None:
            running = self._passes.maybe(message.context, message.pass_id)
            if running is not None:
                self._passes.over(running)
                if running.ledger is not None:
                    running.ledger.keep()
            return
        put_back = partial(self._put_back, message, message.failure, source)
        self._agent.dispatch.service.submit(partial(self._agent.guarded, source, put_back))

    def _put_back(self, message: PassEnded, failure: Failure, source: Source) -> None:
        running = self._passes.maybe(message.context, message.pass_id)
        context = self._contexts.maybe(message.context)
        if running is None and context is not None:
            running = self._passes.heard_of(context, message.pass_id)
        if running is not None:
            running.fail(self._agent.revive(failure))
            over = running.wait_for_run(_RUN_SECONDS)
            self._passes.over(running)
            if not over:  # the root says that we did not confirm
                return
            if running.ledger is not None:
                running.ledger.undo()
        self._agent.answer(source, Done(), deadline=self._agent.clock.now() + _ANSWER_SECONDS)


def _mine(running: Running, start: Start) -> tuple[list[Sent], list[Received] | None, Landmarks]:
    """The Sends to run from, the Recvs to run to if they are counted, and the leaves."""
    context, root = running.context, start.pass_id.worker
    edges = bits_from_wire(start.edges)
    needed = None if start.needed is None else bits_from_wire(start.needed)
    mine, received = [], None
    if edges >> len(context.sent):
        raise BadMessage(f"{start.pass_id} names edges of {context} that never left here")
    for n in numbers(edges):
        sent = context.sent[n]
        if sent is not None and (needed is None or meets(sent.lineage, root, needed)):
            mine.append(sent)
            running.mine |= 1 << n
    landmarks = context.walk.landmarks()
    if start.destination == NOWHERE or _may_be_counted(landmarks):
        received = [
            crossed
            for crossed in tuple(context.received)
            if needed is None or meets(crossed.lineage, root, needed)
        ]
    return mine, received, landmarks


def _may_be_counted(landmarks: Landmarks) -> bool:
    """Whether gradients that are the last thing of a run may wait until it is over, and say so.

    Only if it is over soon then: not while the books of many leaves are closed, or while callbacks
    run that DDP has left to the end.
    """
    accumulators, checkpoints, sinks = landmarks
    if checkpoints or sinks or len(accumulators) > _FEW_LEAVES:
        return False
    return not accumulators or not (dist.is_available() and dist.is_initialized())
