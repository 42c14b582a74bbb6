"""How long to look again and again before sleeping: as long as it pays.

Waking a sleeping thread costs more than a short call. So whoever reads a channel looks a few times
more before it goes to sleep, if lately that was worth it. On a busy machine looking is a
catastrophe: the one we wait for wants our core. Then two looks lie far apart, and that is measured:
a spin that finds that it was not running stops at once, and is not tried again for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

SPIN_SECONDS = 1e-3
_DESCHEDULED_SECONDS = 500e-6
_REST_SECONDS = 0.02
_LONGEST_REST_SECONDS = 0.1


@final
class Spin:
    """For one channel. `begin`, then `goes_on` before each look, `found` if that was worth it."""

    __slots__ = ("_began", "_last", "_now", "_rest", "_rests_until")

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._last = 0.0
        self._rest = _REST_SECONDS
        self._rests_until = 0.0

    def begin(self) -> bool:
        """Whether it is worth to look at all before sleeping."""
        now = self._began = self._last = self._now()
        return now >= self._rests_until

    def goes_on(self) -> bool:
        """Whether to look once more."""
        now = self._now()
        if now - self._last > _DESCHEDULED_SECONDS:
            self._pause(now)
            return False
        self._last = now
        if now - self._began > SPIN_SECONDS:
            self._pause(now)
            return False
        return True

    def found(self) -> None:
        """Something came while we looked."""
        self._rest = _REST_SECONDS

    def _pause(self, now: float) -> None:
        """Each time in vain doubles the pause."""
        self._rests_until = now + self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST_SECONDS)
