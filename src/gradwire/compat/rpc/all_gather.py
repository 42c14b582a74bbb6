"""All-gather: each worker of a set contributes a value, and all receive all values.

The leader waits for all values, the followers wait for the leader. A wait ends if a worker that is
waited for is lost and cannot be reached again. api.py sends the values; all_gather_state.py is the
state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, final

from gradwire.agent.requests.timer import Clock
from gradwire.compat.rpc.all_gather_state import Rounds
from gradwire.errors import CallTimeout, GradwireError, PeerLost
from gradwire.rpc.worker import Worker

P = ParamSpec("P")
Reach = Callable[[str], None]
"""Connect to this worker again; raises if it is gone."""
Present = Callable[[], Collection[str]]
"""The names of all present workers."""

_GRACE_SECONDS = 1.0
"""How long to wait for messages of a lost worker that are still in our threads."""


@final
class AllGather:
    """The all-gathers that one worker takes part in."""

    def __init__(self, name: str, clock: Clock, reach: Reach, present: Present) -> None:
        self._name, self._clock = name, clock
        self._reach, self._present = reach, present
        self._lock = threading.RLock()  # not `with condition`: Ctrl-C inside of it keeps the lock
        self._changed = threading.Condition(self._lock)
        self._rounds = Rounds()

    def note(
        self, event: Callable[Concatenate[Rounds, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Change the state by a message, or a lost worker, and wake those that wait for it."""
        with self._lock:
            event(self._rounds, *args, **kwargs)
            self._changed.notify_all()

    @contextmanager
    def round(self, names: Collection[str]) -> Iterator[str]:
        """Take part in the next round of a set in the block; gives the id of the round."""
        present = self._present()
        with self._lock:
            round = self._rounds.entered(names)
            self._rounds.forget_without(present)
            self._rounds.is_back(min(names))  # if the leader is not, a message to it fails
        try:
            yield round
        finally:
            with self._lock:
                self._rounds.over(round)

    def wait(self, round: str, names: Collection[str], seconds: float) -> dict[str, object]:
        """The values of all workers by name, once they have arrived here."""
        limit, leader = self._clock.now() + seconds, min(names)
        awaited = names if leader == self._name else [leader]
        gathering = f"in an all-gather of {', '.join(sorted(names))}"
        while (values := self._wait(round, awaited, limit)) is None:
            with self._lock:
                missing = ", ".join(self._rounds.missing(round, names))
                lost = self._rounds.waits_in_vain(round, awaited)
            if not lost:
                raise CallTimeout(
                    f"{self._name} waited {seconds:.2f} s {gathering}: no value of {missing}",
                    hint="each of them must take part, the same number of times",
                )
            if self._are_back(lost):
                continue
            self._wait(round, (), min(limit, self._clock.now() + _GRACE_SECONDS))
            with self._lock:
                lost = self._rounds.waits_in_vain(round, awaited)
            if lost:
                raise PeerLost(
                    f"{self._name} waits {gathering} for {', '.join(lost)}, which was lost",
                    hint="gather from the remaining workers, or shut down with graceful=False",
                )
        return values

    def _wait(self, round: str, awaited: Collection[str], limit: float) -> dict[str, object] | None:
        """All values; None if the limit has passed, or a worker that is waited for is lost."""
        with self._lock:
            while (values := self._rounds.whole(round)) is None:
                failure = self._rounds.failure(round)
                if failure is not None:
                    raise PeerLost(f"an all-gather of {self._name} failed: {failure}")
                left = limit - self._clock.now()
                if left <= 0 or self._rounds.waits_in_vain(round, awaited):
                    return None
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return values

    def _are_back(self, names: Collection[str]) -> bool:
        for name in names:
            try:
                self._reach(name)
            except GradwireError:
                return False
            with self._lock:
                self._rounds.is_back(name)
        return True


def all_gather(worker: Worker) -> AllGather:
    """The all-gathers of a worker. From its start: a worker lost before the first one counts."""
    agent, directory, seconds = worker.agent, worker.directory, worker.options.timeouts.connect

    def reach(name: str) -> None:
        agent.reach(directory.find(name).id, agent.clock.now() + seconds)

    def present() -> list[str]:
        return [info.name for info in directory.all()]

    gathers = AllGather(worker.name, agent.clock, reach, present)
    agent.on_peer_lost(lambda lost, _: gathers.note(Rounds.lost, directory.name(lost)))
    return gathers
