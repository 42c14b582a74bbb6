"""Gathering values of several workers on all of them: the driver of all_gather_state.py.

How a value gets to the leader, and the whole to the others, is the business of whoever gathers.

The leader waits for everyone, the others wait for the leader. If one that is waited for is lost,
and cannot be reached again, the wait is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import final

from gradwire.agent.requests.timer import Clock
from gradwire.errors import CallTimeout, GradwireError, PeerLost
from gradwire.rpc.all_gather_state import Rounds

Contribute = Callable[[str, str], None]
"""Bring our value to this leader, for this round."""
Conclude = Callable[[str, Collection[str], Mapping[str, object]], None]
"""Send these followers of this round all values."""
GiveUp = Callable[[str, Collection[str], str], None]
"""Tell these followers of this round why they wait in vain."""
Reach = Callable[[str], None]
"""Connect to this worker again; raises if it is gone."""
Present = Callable[[], Collection[str]]
"""The names of all workers there are."""

_GRACE_SECONDS = 1.0
"""What a worker said before it was lost may still be on its way through our threads."""


@final
class Gatherings:
    """Those of one worker."""

    def __init__(self, name: str, clock: Clock, reach: Reach, present: Present) -> None:
        self._name, self._clock = name, clock
        self._reach, self._present = reach, present
        self._changed = threading.Condition()
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
        """The values of all by name, ours among them, once everyone has called this."""
        leader = min(names)
        followers = sorted(set(names) - {leader})
        present = self._present()
        with self._changed:
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
            with self._changed:
                self._rounds.is_back(leader)  # or else it is lost anew, or cannot be told
            contribute(leader, round)
            return self._whole(round, names, [leader], seconds)
        finally:
            with self._changed:
                self._rounds.over(round)

    def heard(self, round: str, name: str, value: object, names: Collection[str]) -> None:
        """A value has reached us, who lead."""
        with self._changed:
            self._rounds.contributed(round, name, value, names)
            self._changed.notify_all()

    def ended(self, round: str, values: Mapping[str, object]) -> None:
        """All values have reached us, who follow."""
        with self._changed:
            self._rounds.concluded(round, values)
            self._changed.notify_all()

    def failed(self, round: str, story: str) -> None:
        """The leader has given up, and tells us, who follow."""
        with self._changed:
            self._rounds.failed(round, story)
            self._changed.notify_all()

    def peer_lost(self, name: str) -> None:
        """There is no connection to this worker any more."""
        with self._changed:
            self._rounds.lost(name)
            self._changed.notify_all()

    def _whole(
        self, round: str, names: Collection[str], awaited: Collection[str], seconds: float
    ) -> dict[str, object]:
        limit = self._clock.now() + seconds
        while (values := self._wait(round, awaited, limit)) is None:
            with self._changed:
                missing = ", ".join(self._rounds.missing(round, names))
                lost = self._rounds.waits_in_vain(round, awaited)
            story = f"in a gathering of {', '.join(sorted(names))}"
            if not lost:
                raise CallTimeout(
                    f"{self._name} waited {seconds:.2f} s {story} and did not hear of {missing}",
                    hint="every one of them must take part, the same number of times",
                )
            if not self._are_back(lost):
                grace = min(limit, self._clock.now() + _GRACE_SECONDS)
                values = self._wait(round, (), grace)
                if values is not None:
                    return values
                self._check_none_lost(round, awaited, story)
        return values

    def _wait(self, round: str, awaited: Collection[str], limit: float) -> dict[str, object] | None:
        """All values; None if the limit has passed, or one of those we wait for is lost."""
        with self._changed:
            while (values := self._rounds.whole(round)) is None:
                failure = self._rounds.failure(round)
                if failure is not None:
                    raise PeerLost(f"{self._name} gathers in vain: {failure}")
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
            with self._changed:
                self._rounds.is_back(name)
        return True

    def _check_none_lost(self, round: str, awaited: Collection[str], story: str) -> None:
        with self._changed:
            lost = self._rounds.waits_in_vain(round, awaited)
        if lost:
            raise PeerLost(
                f"{self._name} waits {story} for {', '.join(lost)}, and lost it",
                hint="gather those that are left, or leave without waiting for the others",
            )
