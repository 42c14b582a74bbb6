"""Coming and going in an open world: telling the others, and hearing it from them.

A newcomer need only connect: its handshake says who it is. One that leaves says so and waits until
it was heard, so that nobody calls it any more by mistake.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.membership.register import Register
from gradwire.agent.membership.shutdown import Parted
from gradwire.agent.messages import Done, Left
from gradwire.agent.peers.directory import WorkerInfo
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import DeadlinePassed, GradwireError, NotTrusted, PeerLost
from gradwire.ids import WorkerId

_LOOK_AGAIN_SECONDS = 0.005
_TRY_AGAIN_SECONDS = 0.05
_ANSWER_SECONDS = 10.0
_log = logging.getLogger("gradwire")


@final
class Membership:
    """One worker's part in an open world."""

    def __init__(self, agent: Agent, register: Register) -> None:
        self._agent = agent
        self._register = register
        self._me = agent.directory.myself
        agent.handle(Left, self._serve_left, Lane.SERVICE)

    def come(self, deadline: float) -> None:
        """Let everyone who was here before know us. Those that are dead are told of no more."""
        dead: set[int] = set()
        for info in self._agent.directory.others():
            life = self._agent.directory.life(info.id)
            if not self._reached(info, deadline):
                dead.add(life)
                self._agent.directory.left(info.id, life)
        self._register.settle(self._me, dead, deadline)

    def _reached(self, info: WorkerInfo, deadline: float) -> bool:
        """Whether it lives. One that is slow is tried again: it must hear of us to reach us.

        So is one that sent us away: where many strangers knock, one of us may go with them.
        """
        address = self._agent.directory.address(info.id)
        while True:
            try:
                self._agent.reach(info.id, deadline)
                return True
            except NotTrusted:
                raise
            except PeerLost:
                if not self._register.is_alive(address):
                    return False
            except DeadlinePassed:
                pass
            if self._agent.clock.now() >= deadline:
                _log.warning("%s joined, but %s did not answer it", self._me.name, info.name)
                return True
            threading.Event().wait(_TRY_AGAIN_SECONDS)

    def leave(
        self,
        seconds: float,
        let_go: Callable[[], None],
        busy: Callable[[], bool],
        look: Callable[[], None] = lambda: None,
    ) -> Parted:
        """Wait for what is in flight here, let go of what we hold, and tell the others.

        Ends in time in any case. Who did not hear it goes on without us: it is no error.
        """
        deadline = self._agent.clock.now() + seconds
        self._wait_while(busy, deadline)
        let_go()
        self._wait_while(busy, deadline)
        look()
        self.give_back_seat(deadline)
        deaf: list[str] = []
        told: set[int] = set()
        while untold := {self._agent.directory.life(i.id): i.id for i in self._untold(told)}:
            told |= untold.keys()
            deaf += self._tell(list(untold.values()), deadline)
        self._wait_while(busy, deadline)
        return Parted([], deaf, [])

    def close(self) -> None:
        """Let go of the store."""
        self._register.close()

    def give_back_seat(self, deadline: float) -> None:
        """Later workers shall not look for us. The store may be gone already, with its host."""
        try:
            self._register.give_back({self._me.life}, deadline)
        except RuntimeError as error:
            _log.info("%s left, but its place in the roster stays: %s", self._me.name, error)

    def _untold(self, told: set[int]) -> list[WorkerInfo]:
        directory = self._agent.directory
        return [info for info in directory.others() if directory.life(info.id) not in told]

    def _tell(self, workers: list[WorkerId], deadline: float) -> list[str]:
        """Say goodbye to all of them at once; who did not hear it. The dead need not."""
        heard = []
        for worker in workers:
            try:
                what = f"the departure of {self._me.name}"
                _, promise = self._agent.request(
                    worker,
                    Left(self._me.life),
                    deadline=deadline,
                    description=what,
                    phase="shutdown",
                )
                heard.append((worker, promise))
            except GradwireError:
                continue
        outcomes = [(worker, promise.wait()) for worker, promise in heard]
        late = [worker for worker, outcome in outcomes if isinstance(outcome, DeadlinePassed)]
        return [self._agent.directory.name(worker) for worker in late]

    def _wait_while(self, busy: Callable[[], bool], deadline: float) -> None:
        while busy() and self._agent.clock.now() < deadline:
            threading.Event().wait(_LOOK_AGAIN_SECONDS)

    def _serve_left(self, message: Left, _: Payload, source: Source) -> None:
        self._agent.directory.left(source.worker, message.life)
        limit = self._agent.clock.now() + _ANSWER_SECONDS
        self._agent.answer(source, Done(), deadline=limit)
