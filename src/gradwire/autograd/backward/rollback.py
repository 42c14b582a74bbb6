"""The end of a failed pass: the workers that took part put back what it has changed, and say so.

The root does not wait for them beyond the deadline of the pass. What they have not confirmed by
then goes on without it: until all of them have, its context takes no other pass, as that could add
to gradients which are about to be put back. One that is lost need not answer: it loses the root
too, asks how the pass ended and puts it back by itself, before it runs for that root again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.messages import Done, Failure
from gradwire.agent.requests.promise import Promise
from gradwire.autograd.graph.context import Context
from gradwire.autograd.messages import PassEnded
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost, RemoteError
from gradwire.ids import PassId, WorkerId

_log = logging.getLogger("gradwire")
_CONFIRM_SECONDS = 75.0
"""How long a worker may take to put back, in all: more than it waits for its own run to return."""


@final
class Ending:
    """Of one failed pass, on its root."""

    def __init__(
        self, agent: Agent, context: Context, pass_id: PassId, workers: Iterable[WorkerId]
    ) -> None:
        self._agent, self._context, self._id = agent, context, pass_id
        self._confirmed: dict[WorkerId, Promise[None]] = {worker: Promise() for worker in workers}
        self._asked: list[Promise[Outcome]] = []
        self._dropped = False
        self.remarks: list[str] = []
        """what workers say that they could not put back"""

    def begin(self, failure: Failure) -> None:
        """Tell all of them, from other threads: to send to one that does not read may block."""
        if not self._confirmed:
            return
        self._context.endings[self._id] = self
        ended = PassEnded(self._context.id, self._id, failure)
        for worker in self._confirmed:
            is_there = self._agent.is_connected(worker)
            tell = partial(self._tell, worker, ended, is_there)
            if not self._agent.dispatch.service.submit(tell):  # this worker shuts down
                self._settled(worker)

    def wait(self, deadline: float, seconds: float, lost_seconds: float) -> str:
        """Wait for them until the deadline, so long at most; who has not confirmed then, if any."""
        clock = self._agent.clock
        now = clock.now()
        for worker, confirmed in self._confirmed.items():
            patience = seconds if self._agent.is_connected(worker) else lost_seconds
            try:
                confirmed.wait(min(deadline, now + patience) - clock.now())
            except TimeoutError:
                continue
        return self.silent()

    def silent(self) -> str:
        """The names of those who have not confirmed."""
        late = [worker for worker, done in self._confirmed.items() if not done.settled]
        return ", ".join(map(self._agent.directory.name, late))

    def drop(self) -> None:
        """The context is closed: nobody wants to know any more. They put back all the same."""
        self._dropped = True
        for answer in list(self._asked):
            self._agent.cancel(answer, "its context is closed")

    def _tell(self, worker: WorkerId, ended: PassEnded, is_there: bool) -> None:
        limit = self._agent.clock.now() + _CONFIRM_SECONDS
        what = f"end of {self._id}"
        try:
            _, answer = self._agent.request(
                worker, ended, deadline=limit, description=what, phase="backward"
            )
        except GradwireError as error:
            # Lost, or shut down: it ends its passes by itself. Else it has not read what was sent.
            if is_there and isinstance(error, DeadlinePassed):
                self._is_broken(worker)
            self._settled(worker)
            return
        self._asked.append(answer)
        if self._dropped:
            self._agent.cancel(answer, "its context is closed")
        answer.on_settled(partial(self._heard, worker))

    def _heard(self, worker: WorkerId, outcome: Outcome) -> None:
        is_back = isinstance(outcome, Answer) and isinstance(outcome.message, Done)
        if isinstance(outcome, RemoteError):
            self.remarks.append(outcome.message)
        if not is_back and not isinstance(outcome, PeerLost) and not self._dropped:
            self._is_broken(worker)
        self._settled(worker)

    def _is_broken(self, worker: WorkerId) -> None:
        """It said that it could not, or nothing at all: nobody knows what its leaves hold."""
        name, me = self._agent.directory.name(worker), self._agent.directory.me.name
        self._context.broken = f"{name} did not confirm that {self._id} was put back"
        _log.error("%s: %s", me, self._context.broken)

    def _settled(self, worker: WorkerId) -> None:
        self._confirmed[worker].settle(None)
        if all(confirmed.settled for confirmed in self._confirmed.values()):
            self._context.endings.pop(self._id, None)
