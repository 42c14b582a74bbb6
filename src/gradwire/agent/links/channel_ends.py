"""The wait for a channel's end to be noticed, by who found that nothing can be sent by it.

Its reader finds the end a moment later, after what the peer sent before. Until then the worker is
taken for connected by this channel, and who tried again at once would fail again, as often as it
tries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.links.readers import ChannelReaders
from gradwire.agent.requests.timer import Clock
from gradwire.transport.base import Channel

_NOTICE_SECONDS = 1.0
"""How long a reader may take."""


@final
class Ends:
    """Those of one worker's channels."""

    def __init__(self, clock: Clock) -> None:
        self._noted = threading.Condition()  # not the worker's lock, which a wait would release
        self._clock = clock

    def noted(self) -> None:
        """A channel is not used any more."""
        with self._noted:
            self._noted.notify_all()

    def wait(
        self,
        lines: ChannelReaders,
        channel: Channel,
        has_ended: Callable[[], bool],
        telling: threading.RLock,
        deadline: float,
    ) -> None:
        """Until that is known, and was told: who tells it holds `telling` meanwhile."""
        until = min(deadline, self._clock.now() + _NOTICE_SECONDS)
        lines.wait(channel, has_ended, partial(self._sleep, has_ended, until))
        if telling.acquire(timeout=max(0.0, until - self._clock.now())):
            telling.release()

    def _sleep(self, has_ended: Callable[[], bool], until: float) -> None:
        with self._noted:
            while not has_ended() and (left := until - self._clock.now()) > 0:
                self._noted.wait(left)
