"""Leaving together: the driver of shutdown_state.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, final

from gradwire.agent.agent import Agent
from gradwire.agent.membership.shutdown_state import OVER, QUIET, READY, Departure, Patience
from gradwire.agent.messages import Leaving
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import GradwireError, PeerLost
from gradwire.ids import WorkerId

_LOOK_AGAIN_SECONDS = 0.005
_SAY_SECONDS = 10.0
_SAY_AGAIN_SECONDS = 0.5


class Parted(NamedTuple):
    """The names of those without whom a worker left."""

    late: list[str]
    """they did not come so far in time"""
    lost: list[str]
    """they were gone before they were quiet"""
    behind: list[str]
    """they did not come so far either, as they may have waited for those that were late"""


@final
class GracefulShutdown:
    """Sees to it that no worker closes while another still needs it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        others = [info.id for info in agent.directory.others()]
        self._departure = Departure(others)
        self._lives = {worker: agent.directory.life(worker) for worker in others}
        self._said = 0
        self._is_over = False
        agent.handle(Leaving, self._serve_leaving, Lane.CONTROL)
        agent.on_peer_lost(self._peer_lost)
        agent.on_peer_joined(self._peer_joined)

    def close(self) -> None:
        """Nobody is told anything any more, and nobody is waited for."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

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
        seconds: float,
        let_go: Callable[[], None],
        busy: Callable[[], bool],
        look: Callable[[], None] = lambda: None,
    ) -> Parted:
        """Wait until all are over, let go of what we hold, wait until all are quiet, look around.

        `seconds` count from when no program is known to run any more (shutdown_state.py).
        """
        patience = Patience(seconds)
        self._say(OVER)
        late = self._wait_for(OVER, patience)
        let_go()
        while busy() and self._left(patience) > 0:
            with self._changed:
                self._changed.wait(_LOOK_AGAIN_SECONDS)
        self._say(QUIET)
        late = late or self._wait_for(QUIET, patience)
        look()
        self._say(READY)
        late = late or self._wait_for(READY, patience)  # whom the others wait for, not these
        return self._parted(late)

    def _parted(self, missing: list[WorkerId]) -> Parted:
        silent = [worker for worker in missing if self._agent.silence_of(worker)]
        with self._changed:
            late = self._departure.causes(missing, silent)
            gone = self._departure.abandoned()
        name = self._agent.directory.name
        lost = [name(worker) for worker in gone if worker not in missing]
        behind = [name(worker) for worker in missing if worker not in late]
        return Parted([name(worker) for worker in late], lost, behind)

    def _left(self, patience: Patience) -> float:
        with self._changed:
            return patience.left(self._agent.clock.now(), self._departure)

    def _say(self, phase: int) -> None:
        self._said = phase
        deadline = self._agent.clock.now() + _SAY_SECONDS
        for info in [] if self._is_over else self._agent.directory.others():
            if self._departure.is_untold(info.id):
                continue  # `_say_again` tells it: to try here too would hold up the others
            change = self._departure.change(info.id)
            try:
                self._agent.tell(info.id, Leaving(phase), deadline=deadline, phase="shutdown")
            except GradwireError as error:
                self._unsaid(info.id, change, error)

    def _wait_for(self, phase: int, patience: Patience) -> list[WorkerId]:
        with self._changed:
            while (missing := self._departure.missing(phase)) and not self._is_over:
                left = patience.left(self._agent.clock.now(), self._departure)
                if left <= 0:
                    return missing
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return []  # or another thread has closed this worker meanwhile

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
            self._is_cut_off(worker)

    def _unsaid(self, worker: WorkerId, change: int, error: GradwireError) -> None:
        """It could not be told. Where nobody listens it is gone, else it may come back."""
        if _is_refusal(error):
            self._is_refused(worker, change)
        else:
            self._is_cut_off(worker)

    def _peer_joined(self, worker: WorkerId) -> None:
        """It may be its own doing: then it is waited for again before we have reached it."""
        with self._changed:
            is_untold = self._departure.joined(worker)
            self._changed.notify_all()
        if is_untold:
            self._agent.dispatch.service.submit(partial(self._say_again, worker))

    def _is_cut_off(self, worker: WorkerId) -> None:
        """Tell it again how far we are, which may be lost with the connection or with its life."""
        with self._changed:
            is_untold = self._departure.cut_off(worker)
            self._changed.notify_all()
        if is_untold:
            self._agent.dispatch.service.submit(partial(self._say_again, worker))

    def _say_again(self, worker: WorkerId) -> None:
        """Until it is heard, or the worker is gone, or we are."""
        pause = threading.Event()
        while self._departure.is_untold(worker) and not self._is_over:
            change = self._departure.change(worker)
            deadline = self._agent.clock.now() + _SAY_SECONDS
            try:
                self._agent.tell(worker, Leaving(self._said), deadline=deadline, phase="shutdown")
            except GradwireError as error:
                if _is_refusal(error):
                    self._is_refused(worker, change)
                else:
                    pause.wait(_SAY_AGAIN_SECONDS)
            else:
                self._was_told(worker, change)

    def _was_told(self, worker: WorkerId, change: int) -> None:
        with self._changed:
            self._departure.told(worker, change)
            self._changed.notify_all()

    def _is_refused(self, worker: WorkerId, change: int) -> None:
        with self._changed:
            self._departure.refused(worker, change)
            self._changed.notify_all()

    def _is_gone(self, worker: WorkerId) -> None:
        with self._changed:
            self._departure.peer_lost(worker)
            self._changed.notify_all()


def _is_refusal(error: BaseException | None) -> bool:
    """Whether nobody listens where the worker did, by the word of the kernel."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        error = error.__cause__
    return False
