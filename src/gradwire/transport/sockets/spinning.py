"""How long a reader spins, polling the socket, before it blocks.

Waking a blocked thread costs more than a short call, so a reader polls for a moment before it
blocks, if that succeeded lately. On a busy machine spinning is harmful: the peer needs the core.
Then the reader is descheduled between two polls, which shows in their times: it stops at once and
does not spin again for a while.
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
    """The spin state of one channel: `begin`, `should_continue` before each poll, `found`."""

    __slots__ = ("_began", "_last", "_now", "_rest", "_rests_until")

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._last = 0.0
        self._rest = _REST_SECONDS
        self._rests_until = 0.0

    def begin(self) -> bool:
        """Start a spin; whether to spin at all."""
        now = self._began = self._last = self._now()
        return now >= self._rests_until

    def should_continue(self) -> bool:
        """Whether to poll once more; after a failure, rest twice as long as after the last."""
        now = self._now()
        was_descheduled = now - self._last > _DESCHEDULED_SECONDS
        self._last = now
        if not was_descheduled and now - self._began <= SPIN_SECONDS:
            return True
        self._rests_until = now + self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST_SECONDS)
        return False

    def found(self) -> None:
        """The spin succeeded: bytes arrived."""
        self._rest = _REST_SECONDS
