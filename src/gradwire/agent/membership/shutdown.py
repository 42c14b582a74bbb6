"""Graceful shutdown of a closed world: the driver of shutdown_state.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, final

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.membership.shutdown_state import (
    OVER,
    QUIET,
    READY,
    ShutdownDeadline,
    ShutdownProgress,
)
from gradwire.agent.messages import Done, Leaving
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import GradwireError, PeerLost
from gradwire.ids import WorkerId

_LOOK_AGAIN_SECONDS = 0.005
_TELL_SECONDS = 10.0
_TELL_AGAIN_SECONDS = 0.5
_CONFIRM_SECONDS = 30.0
"""How long to wait for peers that are ready to confirm that we are. They may be gone already, which
a closed port tells at once, but not one behind a proxy; then this is waited for nothing. If it were
too short for a busy machine, a peer that has not heard would wait until its `shutdown(timeout=)`.
"""


class ShutdownResult(NamedTuple):
    """The names of the peers that a worker shut down without."""

    late: list[str]
    """those that did not reach the last phase in time"""
    lost: list[str]
    """those that were lost before they were quiet"""
    behind: list[str]
    """those that did not reach it either, but may have waited for those that were late"""


@final
class GracefulShutdown:
    """Keeps one worker open until no other worker needs it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # not `with condition`: Ctrl-C inside of it keeps the lock
        self._changed = threading.Condition(self._lock)
        others = [info.id for info in agent.directory.others()]
        self._progress = ShutdownProgress(others)
        self._incarnations = {worker: agent.directory.incarnation(worker) for worker in others}
        self._phase = self._answering = 0
        """`_answering`: how many peers are just told that we know that they are ready"""
        self._is_over = False
        agent.handle(Leaving, self._serve_leaving, Lane.SERVICE)
        agent.on_peer_lost(self._peer_lost)
        agent.on_peer_joined(self._peer_joined)

    def close(self) -> None:
        """Tell no peer anything any more, and wait for none."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()

    def wait_until_over(self, worker: WorkerId, deadline: float) -> bool:
        """Wait until a peer's program is over, in this incarnation or a later one; False if late.

        The loss of the peer does not end the wait: it may come back.
        """
        with self._lock:
            while not self._progress.has_reached(worker, OVER):
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
    ) -> ShutdownResult:
        """Go through the three phases: `let_go` runs when all are over, `look` when all are quiet.

        `busy` says whether this worker has requests in flight. `seconds` count from when no program
        is known to run any more (see shutdown_state.py).
        """
        deadline = ShutdownDeadline(seconds)
        self._tell_all(OVER)
        late = self._wait_for(OVER, deadline)
        let_go()
        while busy() and self._left(deadline) > 0:
            with self._lock:
                self._changed.wait(_LOOK_AGAIN_SECONDS)
        self._tell_all(QUIET)
        late = late or self._wait_for(QUIET, deadline)
        look()
        self._tell_all(READY)
        late = late or self._wait_for(READY, deadline)  # the first failed phase names the cause
        self._wait_until_confirmed(self._agent.clock.now() + _CONFIRM_SECONDS)
        return self._result(late)

    def _result(self, missing: list[WorkerId]) -> ShutdownResult:
        silent = [worker for worker in missing if self._agent.silence_of(worker)]
        with self._lock:
            late = self._progress.blockers(missing, silent)
            gone = self._progress.lost_before_quiet()
        name = self._agent.directory.name
        lost = [name(worker) for worker in gone if worker not in missing]
        behind = [name(worker) for worker in missing if worker not in late]
        return ShutdownResult([name(worker) for worker in late], lost, behind)

    def _left(self, deadline: ShutdownDeadline) -> float:
        with self._lock:
            return deadline.left(self._agent.clock.now(), self._progress)

    def _tell_all(self, phase: int) -> None:
        self._phase = phase
        deadline = self._agent.clock.now() + _TELL_SECONDS
        for info in [] if self._is_over else self._agent.directory.others():
            if self._progress.is_untold(info.id):
                continue  # `_tell_again` tries already; a second try here would delay the others
            epoch = self._progress.epoch(info.id)
            try:
                self._tell(info.id, deadline)
            except GradwireError as error:
                self._tell_failed(info.id, epoch, error)

    def _tell(self, worker: WorkerId, deadline: float) -> Promise[Outcome] | None:
        """Tell a peer our phase. The last one is a request: the peer confirms it."""
        leaving = Leaving(self._phase)
        if self._phase < READY:
            self._agent.tell(worker, leaving, deadline=deadline, phase="shutdown")
            return None
        what = "the end of shutdown"
        _, answer = self._agent.request(
            worker, leaving, deadline=deadline, description=what, phase="shutdown"
        )
        answer.on_settled(partial(self._ready_answered, worker))
        return answer

    def _ready_answered(self, worker: WorkerId, outcome: Outcome) -> None:
        if isinstance(outcome, Answer):
            with self._lock:
                self._progress.confirmed(worker)
                self._changed.notify_all()

    def _wait_until_confirmed(self, until: float) -> None:
        with self._lock:
            while (self._progress.unconfirmed() or self._answering) and not self._is_over:
                left = until - self._agent.clock.now()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _wait_for(self, phase: int, deadline: ShutdownDeadline) -> list[WorkerId]:
        with self._lock:
            while (missing := self._progress.missing(phase)) and not self._is_over:
                left = deadline.left(self._agent.clock.now(), self._progress)
                if left <= 0:
                    return missing
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return []  # all have reached it, or another thread has closed this worker

    def _serve_leaving(self, message: Leaving, _: Payload, source: Source) -> None:
        # It counts before the answer leaves: with that the peer may close its connection, and one
        # that is not known to be ready would be told our phase again.
        with self._lock:
            self._progress.reached(source.worker, message.phase)
            self._answering += bool(source.request)  # this worker does not close meanwhile
            self._changed.notify_all()
        if source.request:
            with suppress(GradwireError):
                limit = self._agent.clock.now() + _TELL_SECONDS
                self._agent.answer(source, Done(), deadline=limit)
            with self._lock:
                self._answering -= 1
                self._changed.notify_all()

    def _peer_lost(self, worker: WorkerId, _: PeerLost) -> None:
        incarnation = self._agent.directory.incarnation(worker)
        with self._lock:
            is_back = incarnation > self._incarnations.get(worker, incarnation)
            self._incarnations[worker] = incarnation
            if is_back:
                self._progress.reborn(worker)
                self._changed.notify_all()
            may_be_gone = self._progress.may_be_gone(worker)
        if may_be_gone:
            self._is_gone(worker)
        elif self._phase:
            self._disconnected(worker)

    def _tell_failed(self, worker: WorkerId, epoch: int, error: GradwireError) -> None:
        """A peer could not be told. If its port is closed it is gone, else it may come back."""
        if _is_refusal(error):
            self._is_refused(worker, epoch)
        else:
            self._disconnected(worker)

    def _peer_joined(self, worker: WorkerId) -> None:
        """A peer that was taken for gone may have connected: wait for it, and tell it our phase."""
        with self._lock:
            is_untold = self._progress.connected(worker)
            self._changed.notify_all()
        if is_untold:
            self._agent.dispatch.service.submit(partial(self._tell_again, worker))

    def _disconnected(self, worker: WorkerId) -> None:
        """Tell the peer our phase again: the last message may be lost with the connection."""
        with self._lock:
            is_untold = self._progress.disconnected(worker)
            self._changed.notify_all()
        if is_untold:
            self._agent.dispatch.service.submit(partial(self._tell_again, worker))

    def _tell_again(self, worker: WorkerId) -> None:
        """Repeat until the peer has been told or is gone, or this worker is closed."""
        while self._progress.is_untold(worker) and not self._is_over:
            epoch = self._progress.epoch(worker)
            deadline = self._agent.clock.now() + _TELL_SECONDS
            try:
                answer = self._tell(worker, deadline)
                outcome = None if answer is None else self._agent.wait_for(worker, answer)
                if isinstance(outcome, GradwireError):
                    raise outcome
            except GradwireError as error:
                if _is_refusal(error):
                    self._is_refused(worker, epoch)
                else:
                    with self._lock:
                        self._changed.wait(_TELL_AGAIN_SECONDS)
            else:
                self._was_told(worker, epoch)

    def _was_told(self, worker: WorkerId, epoch: int) -> None:
        with self._lock:
            self._progress.told(worker, epoch)
            self._changed.notify_all()

    def _is_refused(self, worker: WorkerId, epoch: int) -> None:
        with self._lock:
            self._progress.refused(worker, epoch)
            self._changed.notify_all()

    def _is_gone(self, worker: WorkerId) -> None:
        with self._lock:
            self._progress.peer_lost(worker)
            self._changed.notify_all()


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the kernel says that no process listens at the address any more."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        error = error.__cause__
    return False
