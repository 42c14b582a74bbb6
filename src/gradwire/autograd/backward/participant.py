"""A worker's part in a pass that began elsewhere: one engine run over its Sends, then Done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import final

from msgspec.structs import replace

from gradwire.agent.agent import Agent, Answer
from gradwire.agent.messages import Done, Failure
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.agent.serving.thread_pool import Job
from gradwire.autograd.anomaly import detecting
from gradwire.autograd.backward import engine_run as run
from gradwire.autograd.backward.active_pass import ActivePass
from gradwire.autograd.backward.admission import Admission, Failed
from gradwire.autograd.backward.pass_table import PassTable
from gradwire.autograd.backward.sends import sends_of
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.context_table import Contexts
from gradwire.autograd.graph.validate import check_gradients, check_root
from gradwire.autograd.graph.walk import Landmarks
from gradwire.autograd.messages import (
    NOWHERE,
    TO_MAP,
    HasEnded,
    PassEnded,
    QueryPass,
    RunDone,
    RunFailed,
    Start,
)
from gradwire.autograd.profiling import span
from gradwire.autograd.undo.leaf import LeafLocks
from gradwire.autograd.undo.undo_log import UndoLog
from gradwire.errors import BadMessage, ContextClosed, DeadlinePassed, GradwireError, PeerLost
from gradwire.ids import ContextId, WorkerId
from gradwire.torch_private import (
    is_profiled,
    is_recording,
    recording,
    will_execute,
)

_ANSWER_SECONDS = 10.0
_RUN_SECONDS = 60.0
_IN_DOUBT_SECONDS = 30.0
"""How long a root that cannot be reached is asked how its pass ended; then it is taken for dead."""
_REFUSALS = 3
_ASK_AGAIN_SECONDS = 0.05


_NO_CHECKPOINTS = (
    "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an "
    "`inputs` parameter to .backward(), and with a backward inside of these"
)


@final
class Served:
    """Serves Start and the end of a pass."""

    def __init__(
        self,
        agent: Agent,
        contexts: Contexts,
        passes: PassTable,
        locks: LeafLocks,
        inside: Callable[[ContextId], AbstractContextManager[None]],
        admission: Admission,
    ) -> None:
        self._agent, self._contexts, self._passes = agent, contexts, passes
        self._locks, self._inside, self._admission = locks, inside, admission
        self._ends = PeerLimit("runs", agent.limits.runs)
        """ends of failed passes that wait, each on a thread, for the run here to be over"""
        self._doubts: dict[WorkerId, list[Promise[None]]] = {}
        """the roots that were lost, until what their passes have changed is kept or put back"""
        self._in_doubt: set[ActivePass] = set()
        agent.handle(Start, self._serve_start, Lane.SERVICE)
        agent.handle(PassEnded, self._serve_ended, Lane.CONTROL)

    def _serve_start(self, start: Start, payload: Payload, source: Source) -> None:
        root = source.worker
        check_root(start.pass_id, root)
        limit = self._admission.deadline(start.seconds)
        failed = partial(self._tell_failed, start, root, limit)
        run = partial(self._begin, start, payload, source, limit, failed)
        self._admission.admit(root, run, failed)

    def _begin(
        self, start: Start, payload: Payload, source: Source, limit: float, failed: Failed
    ) -> bool:
        """Take part, now or later; True if later. See Note [Who may have us run], admission.py."""
        root, admission = source.worker, self._admission
        context = self._contexts.maybe(start.context) or self._find(start, root)
        running = self._passes.heard_of(context, start.pass_id, limit)
        if running is None:  # it failed before it reached us
            self._agent.noting.came_late(root)
            return False
        try:
            self._agent.check_asker(source)
        except PeerLost:  # which may have been dealt with before the pass came to be
            self._passes.over(running)
            raise
        running.start_came()
        if self._doubts.get(root):
            self._wait_while_in_doubt(root, running, limit - self._agent.clock.now())
        first = start.first
        if first is not None and check_gradients(context, first.edge, root):
            running.settle_with(first, payload, self._agent.limits)
        run = partial(self._take_part_and_tell, running, start, limit)
        if not admission.is_known(context, root) and sends_of(running, start)[0]:
            return admission.park(running, run, failed) or run()
        return run()

    def _take_part_and_tell(self, running: ActivePass, start: Start, limit: float) -> bool:
        try:
            self._take_part(running, start)
        except BaseException:
            # It has put back what it did. If its root never ends the pass, nothing is left of it.
            self._passes.over(running)
            raise
        self._tell_done(running, start.pass_id.worker, limit)
        return False

    def _wait_while_in_doubt(self, root: WorkerId, running: ActivePass, seconds: float) -> None:
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

    def _tell_done(self, running: ActivePass, root: WorkerId, limit: float) -> None:
        """If nothing was changed here, the pass is over here too."""
        assert running.undo_log is not None, "its run is over"
        has_changed = running.undo_log.has_changed
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
        self, start: Start, root: WorkerId, limit: float, error: BaseException
    ) -> None:
        failed = RunFailed(start.context, start.pass_id, self._agent.describe(error))
        try:
            self._agent.tell(root, failed, deadline=limit, phase="backward")
        except GradwireError:
            self._agent.events.emit("untold", start.pass_id)

    def _take_part(self, running: ActivePass, start: Start) -> None:
        into = running.context.gradients if start.destination == TO_MAP else None
        undo_log = UndoLog(self._locks, into)
        running.run_begins(undo_log)
        if self._agent.events.are_heard:
            self._agent.events.emit("run", running.id)
        try:
            with self._inside(running.context.id):
                execute = self._run_watched if start.anomaly else self._run
                execute(running, undo_log, start)
            running.check_collected()
        except BaseException as error:
            undo_log.undo()
            if stays := undo_log.what_stays(self._agent.directory.me.name):
                error.add_note(stays)
            running.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        finally:
            given_up = running.run_over()
            if given_up:  # meanwhile, perhaps by those who put back
                undo_log.undo()
        if given_up and running.error is not None:  # the root must not take it for done
            raise fresh(running.error)

    def _run_watched(self, running: ActivePass, undo_log: UndoLog, start: Start) -> None:
        sends = [sent.node for sent in sends_of(running, start)[0]]
        with detecting(start.anomaly, sends, self._agent.directory.me.name):
            self._run(running, undo_log, start)

    def _run(self, running: ActivePass, undo_log: UndoLog, start: Start) -> None:
        if not is_recording():
            with recording():
                return self._run(running, undo_log, start)
        sends, received, landmarks = sends_of(running, start)
        if not sends:
            return None

        def enter() -> None:
            self._passes.enter(running, undo_log.run)
            _check_checkpoints(start, landmarks)
            if received is not None:
                recvs = sum([will_execute(crossed.node) for crossed in received])
                leaves = sum(map(will_execute, counted))
                running.run_counted(len(sends), recvs, leaves)

        counted = () if start.destination == NOWHERE else landmarks.accumulators
        tokens = tuple([sent.token for sent in sends])
        retain, create = start.retain_graph, start.create_graph
        named = _span(running) if is_profiled() else None
        if start.destination == NOWHERE:
            anchors = tuple([r.anchor for r in received or ()])
            run.run_towards(
                anchors,
                tokens,
                undo_log,
                enter,
                retain_graph=retain,
                create_graph=create,
                span=named,
            )
        else:
            run.accumulate(
                tokens,
                None,
                undo_log,
                landmarks,
                enter,
                retain_graph=retain,
                create_graph=create,
                span=named,
                checkpoints=start.checkpoints,
            )
        return None

    def root_lost(self, worker: WorkerId) -> Job:
        """What puts back what passes that began there have changed here, unless they ended well.

        A run that is over here may be one that ended well, and the word of it was lost with the
        connection. Where nobody listens any more there is nobody who could count on it. Until that
        is settled no pass of the same root begins here.
        """
        rooted = [one for one in self._passes.rooted_at(worker) if one not in self._in_doubt]
        if not rooted:  # or it was lost before, and that is being settled
            return lambda: None
        self._in_doubt.update(rooted)
        doubt: Promise[None] = Promise()
        self._doubts.setdefault(worker, []).append(doubt)
        return partial(self._settle, worker, rooted, doubt)

    def _settle(self, worker: WorkerId, rooted: list[ActivePass], doubt: Promise[None]) -> None:
        try:
            for running in rooted:
                if running.wait_for_run(_RUN_SECONDS) and running.undo_log is not None:
                    if self._ended_well(worker, running):
                        running.undo_log.keep()
                    else:
                        running.undo_log.undo()
                self._passes.over(running)
        finally:
            self._in_doubt.difference_update(rooted)
            self._doubts[worker].remove(doubt)
            doubt.settle(None)

    def _ended_well(self, root: WorkerId, running: ActivePass) -> bool:
        agent = self._agent
        limit = agent.clock.now() + _IN_DOUBT_SECONDS
        asked = QueryPass(running.context.id, running.id)
        refused = 0
        while agent.clock.now() < limit and refused < _REFUSALS:
            until = min(limit, agent.clock.now() + _ANSWER_SECONDS)
            try:
                _, promise = agent.request(
                    root, asked, deadline=until, description=f"end of {running.id}"
                )
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
                if running.is_running():  # its books would be closed before all is in them
                    raise BadMessage(f"{running.id} ended well before its run here was over")
                self._passes.over(running)
                if running.undo_log is not None:
                    running.undo_log.keep(self._agent.dispatch.service.submit)
            return
        self._ends.take(source.worker)
        put_back = partial(self._put_back, message, message.failure, source)
        self._agent.dispatch.service.submit(partial(self._agent.guarded, source, put_back))

    def _put_back(self, message: PassEnded, failure: Failure, source: Source) -> None:
        try:
            is_back = self._is_put_back(message, failure)
        finally:
            self._ends.give_back(source.worker)
        if is_back:  # else the root says that we did not confirm
            self._agent.answer(source, Done(), deadline=self._agent.clock.now() + _ANSWER_SECONDS)

    def _is_put_back(self, message: PassEnded, failure: Failure) -> bool:
        running = self._passes.maybe(message.context, message.pass_id)
        context = self._contexts.maybe(message.context)
        if running is None and context is not None:
            running = self._passes.heard_of(context, message.pass_id)
        if running is not None:
            running.fail(self._agent.revive(failure))
            over = running.wait_for_run(_RUN_SECONDS)
            self._passes.over(running)
            if not over:
                return False
            if running.undo_log is not None:
                if not running.undo_log.undo():
                    return False
                if stays := running.undo_log.what_stays(self._agent.directory.me.name):
                    raise GradwireError(stays)
        return True


def _check_checkpoints(start: Start, landmarks: Landmarks) -> None:
    """Refuse what torch refuses in one process; called from inside the run."""
    if not start.checkpoints and any(map(will_execute, landmarks.checkpoints)):
        raise RuntimeError(_NO_CHECKPOINTS)


def _span(running: ActivePass) -> AbstractContextManager[object]:
    return span("gradwire backward %s of %s", running.id, running.context)
