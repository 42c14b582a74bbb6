"""Gathering values of several workers on all of them: the driver of gathering_state.py.

How a value gets to the leader, and the whole to the others, is the business of whoever gathers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import final

from gradwire.agent.clock import Clock
from gradwire.errors import CallTimeout
from gradwire.rpc.gathering_state import Rounds

Contribute = Callable[[str, str], None]
"""Bring our value to this leader, for this round."""
Conclude = Callable[[str, Collection[str], Mapping[str, object]], None]
"""Send these followers of this round all values."""


@final
class Gatherings:
    """Those of one worker."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
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
    ) -> dict[str, object]:
        """The values of all by name, ours among them, once everyone has called this."""
        leader = min(names)
        with self._changed:
            round = self._rounds.entered(names)
        try:
            if leader == self._name:
                self.heard(round, leader, value, names)
                values = self._whole(round, names, seconds)
                conclude(round, sorted(set(names) - {leader}), values)
                return values
            contribute(leader, round)
            return self._whole(round, names, seconds)
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

    def _whole(self, round: str, names: Collection[str], seconds: float) -> dict[str, object]:
        limit = self._clock.now() + seconds
        with self._changed:
            while (values := self._rounds.whole(round)) is None:
                left = limit - self._clock.now()
                if left <= 0:
                    late = ", ".join(self._rounds.missing(round, names))
                    raise CallTimeout(
                        f"{self._name} waited {seconds:.2f} s in a gathering of "
                        f"{', '.join(sorted(names))} and did not hear of {late}",
                        hint="every one of them must take part, the same number of times",
                    )
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return values
