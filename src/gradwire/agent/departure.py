"""Leaving together: the driver of leaving_state.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.dispatch import Lane, Payload
from gradwire.agent.errands import Source
from gradwire.agent.leaving_state import OVER, QUIET, READY, Departure
from gradwire.agent.messages import Leaving
from gradwire.errors import GradwireError, PeerLost
from gradwire.ids import WorkerId

_LOOK_AGAIN_SECONDS = 0.005
_SAY_AGAIN_SECONDS = 10.0


@final
class Leaver:
    """Sees to it that no worker closes while another still needs it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        others = [info.id for info in agent.directory.others()]
        self._departure = Departure(others)
        self._lives = {worker: agent.directory.life(worker) for worker in others}
        self._said = 0
        agent.handle(Leaving, self._serve_leaving, Lane.CONTROL)
        agent.on_peer_lost(self._peer_lost)

    def wait_until_over(self, worker: WorkerId, deadline: float) -> bool:
        """Until a peer's program is over, in this life or a later one; False if it is late.

        Its loss is no end: it may come back.
        """
        with self._changed:
            while not self._departure.has_reached(worker, OVER):
                left = deadline - self._agent.clock.now()
                if left <= 0:
                    return False
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return True

    def leave(
        self,
        deadline: float,
        let_go: Callable[[], None],
        busy: Callable[[], bool],
        look: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Wait until all are over, let go of what we hold, wait until all are quiet, look around.

        Ends at the deadline in any case; the names of those that were given up.
        """
        self._say(OVER, deadline)
        late = self._wait_for(OVER, deadline)
        let_go()
        while busy() and self._agent.clock.now() < deadline:
            with self._changed:
                self._changed.wait(_LOOK_AGAIN_SECONDS)
        self._say(QUIET, deadline)
        late = self._wait_for(QUIET, deadline) or late
        look()
        self._say(READY, deadline)
        late = self._wait_for(READY, deadline) or late
        with self._changed:
            gone = self._departure.abandoned()
        return [self._agent.directory.name(worker) for worker in sorted({*late, *gone})]

    def _say(self, phase: int, deadline: float) -> None:
        self._said = phase
        for info in self._agent.directory.others():
            try:
                self._agent.tell(info.id, Leaving(phase), deadline=deadline, phase="shutdown")
            except GradwireError:
                self._is_gone(info.id)

    def _wait_for(self, phase: int, deadline: float) -> list[WorkerId]:
        with self._changed:
            while missing := self._departure.missing(phase):
                left = deadline - self._agent.clock.now()
                if left <= 0:
                    return missing
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return []

    def _serve_leaving(self, message: Leaving, _: Payload, source: Source) -> None:
        with self._changed:
            self._departure.said(source.worker, message.phase)
            self._changed.notify_all()

    def _peer_lost(self, worker: WorkerId, _: PeerLost) -> None:
        life = self._agent.directory.life(worker)
        with self._changed:
            is_back = life > self._lives.get(worker, life)
            self._lives[worker] = life
            if is_back:
                self._departure.reborn(worker)
                self._changed.notify_all()
            is_ready = self._departure.has_reached(worker, READY)
        if is_ready:
            self._is_gone(worker)
        elif self._said:
            self._agent.dispatch.service.submit(partial(self._say_again, worker, is_back))

    def _say_again(self, worker: WorkerId, is_back: bool) -> None:
        """What was said may be lost with the connection, or with an earlier life.

        Whoever cannot be reached is gone, unless it just came back: then its next life is told.
        """
        deadline = self._agent.clock.now() + _SAY_AGAIN_SECONDS
        try:
            self._agent.tell(worker, Leaving(self._said), deadline=deadline, phase="shutdown")
        except GradwireError:
            if not is_back:
                self._is_gone(worker)

    def _is_gone(self, worker: WorkerId) -> None:
        with self._changed:
            self._departure.peer_lost(worker)
            self._changed.notify_all()
