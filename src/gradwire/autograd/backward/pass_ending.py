"""How a pass ends on its participants: their changes are kept, or reverted.

The coordinator says which (PassEnded). A participant that loses the coordinator first asks it;
until then it keeps the undo log of its run.

A participant confirms that it has reverted a failed pass. The coordinator waits for that no longer
than the deadline of the pass. It then begins no other pass with such a participant until that has
confirmed: it could add to gradients that are about to be reverted. A participant that is lost need
not confirm: it reverts the pass by itself before it runs for that coordinator again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.messages import Done, Failure
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.agent.serving.thread_pool import Job
from gradwire.autograd.backward.active_pass import ParticipantPass
from gradwire.autograd.backward.pass_table import PassTable
from gradwire.autograd.messages import HasEnded, PassEnded, QueryPass
from gradwire.errors import BadMessage, DeadlinePassed, GradwireError, PeerLost, RemoteError
from gradwire.ids import PassId, WorkerId

_log = logging.getLogger("gradwire")
END_SECONDS = 10.0
"""How long to wait for a connected participant's rollback, never beyond the deadline of the pass.

Also how long the question whether a pass ended well, or an answer, may take.
"""
END_LATE_SECONDS = 1.5
"""The same for one that is not connected, and for a new pass that finds an unfinished rollback."""
_CONFIRM_SECONDS = 75.0
"""How long a participant may take in all: longer than it waits for its own run to return."""
_RUN_SECONDS = 60.0
_IN_DOUBT_SECONDS = 30.0
"""How long an unreachable coordinator is asked how its pass ended; then it counts as dead."""
_MOST_FAILED_QUERIES = 3
"""After so many queries that could not be sent, it counts as dead at once."""
_ASK_AGAIN_SECONDS = 0.05

# -- on the coordinator


@final
class Rollback:
    """The rollback of one pass, on its coordinator, which begins when this is made.

    It is `unfinished` until all have confirmed. `broken` gets those whose gradients are unknown.
    """

    def __init__(
        self,
        agent: Agent,
        unfinished: dict[PassId, Rollback],
        broken: dict[WorkerId, str],
        pass_id: PassId,
        workers: Iterable[WorkerId],
        failure: Failure,
    ) -> None:
        self._agent, self._id = agent, pass_id
        self._unfinished, self._broken = unfinished, broken
        self._confirmed: dict[WorkerId, Promise[None]] = {worker: Promise() for worker in workers}
        self.remarks: list[str] = []
        """what participants say that they could not revert"""
        if self._confirmed:
            unfinished[pass_id] = self
        for worker in self._confirmed:
            # Each on a thread: sending blocks if the peer does not read.
            tell = partial(self._tell, worker, failure, agent.is_connected(worker))
            if not agent.dispatch.service.submit(tell):  # this worker shuts down
                self._settle(worker)

    def wait(self, deadline: float, seconds: float) -> str:
        """Wait for them, at most so long; the names of those that have not confirmed then."""
        clock = self._agent.clock
        now = clock.now()
        with self._agent.dispatch.user.waiting():
            for worker, confirmed in self._confirmed.items():
                patience = seconds if self._agent.is_connected(worker) else END_LATE_SECONDS
                try:
                    confirmed.wait(min(deadline, now + patience) - clock.now())
                except TimeoutError:
                    continue
        return ", ".join(map(self._agent.directory.name, self.late()))

    def late(self) -> list[WorkerId]:
        """Those that have not confirmed."""
        return [worker for worker, confirmed in self._confirmed.items() if not confirmed.settled]

    def _tell(self, worker: WorkerId, failure: Failure, is_there: bool) -> None:
        ended, what = PassEnded(self._id, failure), f"end of {self._id}"
        limit = self._agent.clock.now() + _CONFIRM_SECONDS
        try:
            _, answer = self._agent.request(
                worker, ended, deadline=limit, description=what, phase="backward"
            )
        except GradwireError as error:
            # A peer that is lost or shut down ends its passes by itself. One that is connected and
            # did not read the request in time has not heard of the failure.
            if is_there and isinstance(error, DeadlinePassed):
                self._mark_broken(worker)
            self._settle(worker)
            return
        answer.on_settled(partial(self._answered, worker))

    def _answered(self, worker: WorkerId, outcome: Outcome) -> None:
        is_back = isinstance(outcome, Answer) and isinstance(outcome.message, Done)
        if isinstance(outcome, RemoteError):
            self.remarks.append(outcome.message)
        if not is_back and not isinstance(outcome, PeerLost):
            self._mark_broken(worker)
        self._settle(worker)

    def _mark_broken(self, worker: WorkerId) -> None:
        """The worker could not revert the pass, or did not answer: its gradients are unknown."""
        name, me = self._agent.directory.name(worker), self._agent.directory.me.name
        self._broken[worker] = f"{name} did not confirm that {self._id} was rolled back"
        _log.error("%s: %s", me, self._broken[worker])

    def _settle(self, worker: WorkerId) -> None:
        self._confirmed[worker].settle(None)
        if not self.late():
            self._unfinished.pop(self._id, None)


# -- on a participant


@final
class PassEnding:
    """Ends the passes that other workers coordinate."""

    def __init__(self, agent: Agent, passes: PassTable) -> None:
        self._agent, self._passes = agent, passes
        self._rollbacks = PeerLimit("runs", agent.limits.runs)
        """those that wait, each on a thread, for the run here to be over"""
        self._in_doubt: dict[ParticipantPass, Promise[None]] = {}
        """the passes of lost coordinators, until they are committed or rolled back"""
        agent.handle(PassEnded, self._serve_ended, Lane.CONTROL)

    # -- the coordinator says it

    def _serve_ended(self, message: PassEnded, _: Payload, source: Source) -> None:
        # A good end is handled on the reading thread: before the coordinator's next message, or
        # its loss, can be handled. A failure waits for the run here, so it needs another thread.
        check_coordinator(message.pass_id, source.worker)
        if message.failure is None:
            self._keep(message)
            return
        self._rollbacks.take(source.worker)
        roll_back = partial(self._roll_back, message.pass_id, message.failure, source)
        self._agent.dispatch.service.submit(partial(self._agent.guarded, source, roll_back))

    def _keep(self, message: PassEnded) -> None:
        active = self._passes.maybe(message.pass_id)
        if active is None:
            return
        assert isinstance(active, ParticipantPass), "its id names another worker"
        if active.is_running():  # its undo log would end before all entries are in it
            raise BadMessage(f"{active.id} ended well before its run here was over")
        self._passes.over(active)
        if active.undo_log is not None:
            active.undo_log.keep(self._agent.dispatch.service.submit)

    def _roll_back(self, pass_id: PassId, failure: Failure, source: Source) -> None:
        try:
            is_undone = self._undo(pass_id, failure)
        finally:
            self._rollbacks.give_back(source.worker)
        if is_undone:  # else the coordinator reports that this worker did not confirm
            self._agent.answer(source, Done(), deadline=self._agent.clock.now() + END_SECONDS)

    def _undo(self, pass_id: PassId, failure: Failure) -> bool:
        # If it is not known it is added, as failed, so that a Start that comes later is ignored.
        active = self._passes.heard_of(pass_id)
        if active is None:
            return True
        assert isinstance(active, ParticipantPass), "its id names another worker"
        active.fail(self._agent.revive(failure))
        is_over, undo_log = active.wait_for_run(_RUN_SECONDS), active.undo_log
        self._passes.over(active)
        if not is_over or undo_log is None:
            return is_over
        is_undone = undo_log.undo()
        if is_undone and (stays := undo_log.what_stays(self._agent.directory.me.name)):
            raise GradwireError(stays)
        return is_undone

    # -- the coordinator is lost

    def coordinator_lost(self, worker: WorkerId) -> Job:
        """A job that commits or rolls back the passes of a lost coordinator here.

        One whose run is over here may have ended well, and the message was lost. So the coordinator
        is asked; if nobody answers, nobody can rely on the pass, and it is rolled back. Until the
        job is done no pass of the same coordinator begins here.
        """
        begun = [one for one in self._passes.coordinated_by(worker) if one not in self._in_doubt]
        if not begun:  # or an earlier loss is being handled
            return lambda: None
        doubt: Promise[None] = Promise()
        self._in_doubt.update(dict.fromkeys(begun, doubt))
        return partial(self._resolve, worker, begun, doubt)

    def _resolve(
        self, worker: WorkerId, begun: list[ParticipantPass], doubt: Promise[None]
    ) -> None:
        try:
            for active in begun:
                if active.wait_for_run(_RUN_SECONDS) and active.undo_log is not None:
                    if self._ask_whether_ended_well(worker, active):
                        active.undo_log.keep()
                    else:
                        active.undo_log.undo()
                self._passes.over(active)
        finally:
            for active in begun:
                del self._in_doubt[active]
            doubt.settle(None)

    def _ask_whether_ended_well(self, coordinator: WorkerId, active: ParticipantPass) -> bool:
        agent = self._agent
        deadline, failed = agent.clock.now() + _IN_DOUBT_SECONDS, 0
        query, what = QueryPass(active.id), f"end of {active.id}"
        while agent.clock.now() < deadline and failed < _MOST_FAILED_QUERIES:
            until = min(deadline, agent.clock.now() + END_SECONDS)
            try:
                _, promise = agent.request(coordinator, query, deadline=until, description=what)
                outcome = promise.wait()
            except DeadlinePassed:
                continue
            except GradwireError:  # the coordinator is gone, or cannot be reached from here
                failed += 1
                threading.Event().wait(_ASK_AGAIN_SECONDS)
                continue
            if isinstance(outcome, Answer):
                return isinstance(outcome.message, HasEnded) and outcome.message.ended_well
        return False

    def wait_while_in_doubt(self, active: ParticipantPass, deadline: float) -> None:
        """Wait until earlier passes of a coordinator that was lost and is back have an outcome.

        A new pass could add to leaves that one of them has changed.
        """
        if not self._in_doubt:
            return
        seconds = deadline - self._agent.clock.now()
        for other, doubt in list(self._in_doubt.items()):
            if other.id.worker != active.id.worker:
                continue
            try:
                doubt.wait(seconds)
            except TimeoutError:
                raise DeadlinePassed(
                    f"{active.id} timed out waiting for an earlier pass of the same coordinator to "
                    "be committed or rolled back"
                ) from None


def check_coordinator(pass_id: PassId, source: WorkerId) -> None:
    """BadMessage if a pass is begun or ended by another worker than its coordinator."""
    if pass_id.worker != source:
        raise BadMessage(f"w{source} sent a message for {pass_id} but is not its coordinator")
