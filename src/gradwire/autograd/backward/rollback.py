"""The rollback of a failed pass: its participants revert what they have changed, and confirm it.

The coordinator waits for them no longer than the deadline of the pass. Then the rollback goes on
without it, and it begins no other pass with such a participant until that has confirmed, as another
pass could add to gradients that are about to be reverted. A participant that is lost need not
confirm: it has lost the coordinator too, asks how the pass ended and reverts it by itself, before
it runs for that coordinator again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.messages import Done, Failure
from gradwire.agent.requests.promise import Promise
from gradwire.autograd.messages import PassEnded
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost, RemoteError
from gradwire.ids import PassId, WorkerId

_log = logging.getLogger("gradwire")
_CONFIRM_SECONDS = 75.0
"""How long a participant may take in all: longer than it waits for its own run to return."""


@final
class Rollback:
    """The rollback of one pass, on its coordinator."""

    def __init__(
        self,
        agent: Agent,
        unfinished: dict[PassId, Rollback],
        broken: dict[WorkerId, str],
        pass_id: PassId,
        workers: Iterable[WorkerId],
    ) -> None:
        self._agent, self._id = agent, pass_id
        self._unfinished, self._broken = unfinished, broken
        self._confirmed: dict[WorkerId, Promise[None]] = {worker: Promise() for worker in workers}
        self.remarks: list[str] = []
        """what participants say that they could not revert"""

    def begin(self, failure: Failure) -> None:
        """Tell all participants, each on a thread: sending blocks if the peer does not read."""
        if not self._confirmed:
            return
        self._unfinished[self._id] = self
        ended = PassEnded(self._id, failure)
        for worker in self._confirmed:
            is_there = self._agent.is_connected(worker)
            tell = partial(self._tell, worker, ended, is_there)
            if not self._agent.dispatch.service.submit(tell):  # this worker shuts down
                self._settle(worker)

    def wait(self, deadline: float, seconds: float, lost_seconds: float) -> str:
        """Wait for them, at most so long; the names of those that have not confirmed then."""
        clock = self._agent.clock
        now = clock.now()
        for worker, confirmed in self._confirmed.items():
            patience = seconds if self._agent.is_connected(worker) else lost_seconds
            try:
                confirmed.wait(min(deadline, now + patience) - clock.now())
            except TimeoutError:
                continue
        late = [worker for worker, done in self._confirmed.items() if not done.settled]
        return ", ".join(map(self._agent.directory.name, late))

    def concerns(self, workers: Iterable[WorkerId]) -> bool:
        """Whether one of these has not confirmed."""
        return any(w in self._confirmed and not self._confirmed[w].settled for w in workers)

    def _tell(self, worker: WorkerId, ended: PassEnded, is_there: bool) -> None:
        limit = self._agent.clock.now() + _CONFIRM_SECONDS
        what = f"end of {self._id}"
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
        if all(confirmed.settled for confirmed in self._confirmed.values()):
            self._unfinished.pop(self._id, None)
