"""All-gather: each worker of a set contributes a value, and all receive all values.

The leader waits for all values, the followers wait for the leader. A wait ends if a worker that is
waited for is lost and cannot be reached again. How values are sent is up to the caller. The state
is in all_gather_state.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import final

from gradwire.agent.requests.timer import Clock
from gradwire.compat.rpc.all_gather_state import Rounds
from gradwire.errors import CallTimeout, GradwireError, PeerLost
from gradwire.rpc.worker import Worker

Contribute = Callable[[str, str], None]
"""Send our value to this leader, for this round."""
Conclude = Callable[[str, Collection[str], Mapping[str, object]], None]
"""Send these followers of this round all values."""
GiveUp = Callable[[str, Collection[str], str], None]
"""Tell these followers of this round why it has failed."""
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

    def gather(
        self,
        value: object,
        names: Collection[str],
        seconds: float,
        *,
        contribute: Contribute,
        conclude: Conclude,
        give_up: GiveUp,
    ) -> dict[str, object]:
        """The values of all workers by name, once all have called this."""
        leader = min(names)
        followers = sorted(set(names) - {leader})
        present = self._present()
        with self._lock:
            round = self._rounds.entered(names)
            self._rounds.forget_without(present)
        try:
            if leader == self._name:
                self.heard(round, leader, value, names)
                try:
                    values = self._whole(round, names, names, seconds)
                except GradwireError as error:
                    give_up(round, followers, error.message)
                    raise
                conclude(round, followers, values)
                return values
            with self._lock:
                self._rounds.is_back(leader)  # if it is not, contributing to it fails
            contribute(leader, round)
            return self._whole(round, names, [leader], seconds)
        finally:
            with self._lock:
                self._rounds.over(round)

    def heard(self, round: str, name: str, value: object, names: Collection[str]) -> None:
        """The leader, this worker, receives a value."""
        with self._lock:
            self._rounds.contributed(round, name, value, names)
            self._changed.notify_all()

    def ended(self, round: str, values: Mapping[str, object]) -> None:
        """A follower, this worker, receives all values."""
        with self._lock:
            self._rounds.concluded(round, values)
            self._changed.notify_all()

    def failed(self, round: str, reason: str) -> None:
        """A follower, this worker, learns that the leader has given up."""
        with self._lock:
            self._rounds.failed(round, reason)
            self._changed.notify_all()

    def peer_lost(self, name: str) -> None:
        """The connection to this worker has ended."""
        with self._lock:
            self._rounds.lost(name)
            self._changed.notify_all()

    def _whole(
        self, round: str, names: Collection[str], awaited: Collection[str], seconds: float
    ) -> dict[str, object]:
        limit = self._clock.now() + seconds
        while (values := self._wait(round, awaited, limit)) is None:
            with self._lock:
                missing = ", ".join(self._rounds.missing(round, names))
                lost = self._rounds.waits_in_vain(round, awaited)
            gathering = f"in an all-gather of {', '.join(sorted(names))}"
            if not lost:
                raise CallTimeout(
                    f"{self._name} waited {seconds:.2f} s {gathering}: no value of {missing}",
                    hint="each of them must take part, the same number of times",
                )
            if not self._are_back(lost):
                grace = min(limit, self._clock.now() + _GRACE_SECONDS)
                values = self._wait(round, (), grace)
                if values is not None:
                    return values
                self._check_none_lost(round, awaited, gathering)
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

    def _check_none_lost(self, round: str, awaited: Collection[str], gathering: str) -> None:
        with self._lock:
            lost = self._rounds.waits_in_vain(round, awaited)
        if lost:
            raise PeerLost(
                f"{self._name} waits {gathering} for {', '.join(lost)}, which was lost",
                hint="gather from the remaining workers, or shut down with graceful=False",
            )


def all_gather(worker: Worker) -> AllGather:
    """The all-gathers of a worker. From its start: a worker lost before the first one counts."""
    agent, directory, seconds = worker.agent, worker.directory, worker.options.timeouts.connect

    def reach(name: str) -> None:
        agent.reach(directory.find(name).id, agent.clock.now() + seconds)

    def present() -> list[str]:
        return [info.name for info in directory.all()]

    gathers = AllGather(worker.name, agent.clock, reach, present)
    agent.on_peer_lost(lambda lost, _: gathers.peer_lost(directory.name(lost)))
    return gathers
