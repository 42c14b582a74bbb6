"""Graceful shutdown of a closed world: the driver of shutdown_state.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar, final

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.membership.shutdown_state import OVER, QUIET, READY, ShutdownProgress
from gradwire.agent.messages import Done, Leaving
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import GradwireError, PeerLost
from gradwire.ids import WorkerId

P = ParamSpec("P")
T = TypeVar("T")
Action = Callable[[], None]

_LOOK_AGAIN_SECONDS = 0.005
_TELL_SECONDS = 10.0
_TELL_AGAIN_SECONDS = 0.5
_CONFIRM_SECONDS = 30.0
"""How long to wait for peers that are ready to confirm that we are. One behind a proxy may be gone
unnoticed. If it were too short, a peer that has not heard would wait for its `shutdown(timeout=)`.
"""


class ShutdownResult(NamedTuple):
    """The names of the peers that a worker shut down without."""

    late: list[str]  # those that did not reach the last phase in time
    lost: list[str]  # those that were lost before they were quiet
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
        # A peer that was taken for gone may have connected: wait for it, and tell it our phase.
        agent.on_peer_joined(partial(self._connection_changed, self._progress.connected))

    def close(self) -> None:
        """Tell no peer anything any more, and wait for none."""
        with self._lock:
            self._is_over = True
            self._changed.notify_all()

    def wait_until_over(self, worker: WorkerId, deadline: float) -> bool:
        """Wait until a peer's program is over, even if it is lost and comes back; False if late."""
        now, has_reached = self._agent.clock.now, self._progress.has_reached
        return self._wait_until(lambda: has_reached(worker, OVER), lambda: deadline - now())

    def leave(
        self, seconds: float, let_go: Action, busy: Callable[[], bool], look: Action
    ) -> ShutdownResult:
        """Go through the three phases: `let_go` runs when all are over, `look` when all are quiet.

        `busy` says whether this worker has requests in flight. `seconds` count from when no program
        is known to run any more (see shutdown_state.py).
        """
        now, progress = self._agent.clock.now, self._progress
        progress.until = None  # of an earlier call

        def left() -> float:
            with self._lock:
                return progress.seconds_left(now(), seconds)

        late = self._reach(OVER, left)
        let_go()
        while busy() and left() > 0:
            with self._lock:
                self._changed.wait(_LOOK_AGAIN_SECONDS)
        late = self._reach(QUIET, left, late)
        look()
        late = self._reach(READY, left, late)
        until = now() + _CONFIRM_SECONDS
        self._wait_until(
            lambda: self._is_over or not (progress.unconfirmed() or self._answering),
            lambda: until - now(),
        )
        return self._result(late)

    def _reach(
        self, phase: int, left: Callable[[], float], late: Sequence[WorkerId] = ()
    ) -> Sequence[WorkerId]:
        """Tell all peers our phase, and wait until they reach it; returns those that are late.

        After a phase that failed there is no wait: the first failed phase names the cause.
        """
        self._tell_all(phase)
        missing = self._progress.missing
        with self._lock:
            if late or self._wait_until(lambda: self._is_over or not missing(phase), left):
                return late
            return missing(phase)

    def _tell_all(self, phase: int) -> None:
        with self._lock:  # not between the two steps of `_tell_again`
            self._phase = phase
        deadline = self._agent.clock.now() + _TELL_SECONDS
        for info in [] if self._is_over else self._agent.directory.others():
            if self._progress.is_untold(info.id):
                continue  # `_tell_again` tries already; a second try here would delay the others
            epoch = self._progress.epoch(info.id)
            try:
                self._tell(info.id, phase, deadline)
            except GradwireError as error:
                if _is_refusal(error):  # else it may come back
                    self._change(self._progress.refused, info.id, epoch)
                else:
                    self._connection_changed(self._progress.disconnected, info.id)

    def _result(self, missing: Sequence[WorkerId]) -> ShutdownResult:
        silent = [worker for worker in missing if self._agent.silence_of(worker)]
        with self._lock:
            late = self._progress.blockers(missing, silent)
            gone = self._progress.lost_before_quiet()
        name = self._agent.directory.name
        lost = [name(worker) for worker in gone if worker not in missing]
        behind = [name(worker) for worker in missing if worker not in late]
        return ShutdownResult([name(worker) for worker in late], lost, behind)

    def _tell(self, worker: WorkerId, phase: int, deadline: float) -> Promise[Outcome] | None:
        """Tell a peer our phase. The last one is a request: the peer confirms it."""
        leaving = Leaving(phase)
        if phase < READY:
            self._agent.tell(worker, leaving, deadline=deadline, phase="shutdown")
            return None

        def confirmed(outcome: Outcome) -> None:
            if isinstance(outcome, Answer):
                self._change(self._progress.confirmed.add, worker)

        what = "the end of shutdown"
        _, answer = self._agent.request(
            worker, leaving, deadline=deadline, description=what, phase="shutdown"
        )
        answer.on_settled(confirmed)
        return answer

    def _wait_until(self, done: Callable[[], bool], left: Callable[[], float]) -> bool:
        """Wait until `done`; False if no time is left."""
        with self._lock:
            while not done():
                seconds = left()
                if seconds <= 0:
                    return False
                self._changed.wait(min(seconds, threading.TIMEOUT_MAX))
        return True

    def _change(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Change the progress, and wake the threads that wait for it."""
        with self._lock:
            self._changed.notify_all()
            return change(*args, **kwargs)

    def _serve_leaving(self, message: Leaving, _: Payload, source: Source) -> None:
        # It counts before the answer leaves: with that the peer may close its connection, and one
        # that is not known to be ready would be told our phase again.
        with self._lock:
            self._change(self._progress.reached, source.worker, message.phase)
            self._answering += bool(source.request)  # this worker does not close meanwhile
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
            if incarnation > self._incarnations.get(worker, incarnation):
                self._change(self._progress.reborn, worker)
            self._incarnations[worker] = incarnation
            is_gone = self._progress.may_be_gone(worker)
            if is_gone:
                self._change(self._progress.peer_lost, worker)
        if not is_gone and self._phase:
            self._connection_changed(self._progress.disconnected, worker)

    def _connection_changed(self, change: Callable[[WorkerId], bool], worker: WorkerId) -> None:
        """A peer was lost, or is connected again: if it may not know our phase, tell it again."""
        if self._change(change, worker):
            self._agent.dispatch.service.submit(partial(self._tell_again, worker))

    def _tell_again(self, worker: WorkerId) -> None:
        """Repeat until the peer has been told or is gone, or this worker is closed."""
        while self._progress.is_untold(worker) and not self._is_over:
            epoch, phase = self._progress.epoch(worker), self._phase
            try:
                answer = self._tell(worker, phase, self._agent.clock.now() + _TELL_SECONDS)
                outcome = None if answer is None else self._agent.wait_for(worker, answer)
                if isinstance(outcome, GradwireError):
                    raise outcome
                with self._lock:
                    if phase == self._phase:  # else `_tell_all` has left the next one to us
                        self._change(self._progress.told, worker, epoch)
            except GradwireError as error:
                if _is_refusal(error):
                    self._change(self._progress.refused, worker, epoch)
                else:
                    with self._lock:
                        self._changed.wait(_TELL_AGAIN_SECONDS)


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the kernel says that no process listens at the address any more."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        error = error.__cause__
    return False
