"""Which requests are short: known from how long they took before."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

_SHORT_SECONDS = 0.003
_WEIGHT = 0.3
_MOST_KNOWN = 4096


@final
class LatencyEstimate:
    """Of one worker. What it has not seen yet is not short."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}

    def is_short(self, what: Hashable) -> bool:
        """Whether it is worth to run it without handing it over."""
        return self._seconds.get(what, 1.0) < _SHORT_SECONDS

    def took(self, what: Hashable, seconds: float) -> None:
        """It ran for so long."""
        before = self._seconds.get(what)
        if before is None:
            if len(self._seconds) >= _MOST_KNOWN:  # names are the peers': they must not add up
                self._seconds.clear()
            self._seconds[what] = seconds
        else:
            self._seconds[what] = before + _WEIGHT * (seconds - before)
