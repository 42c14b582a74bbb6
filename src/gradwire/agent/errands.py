"""What peers have asked for that is queued or runs here, so that it can be called off.

An errand that has not begun is dropped. One that runs cannot be stopped from outside: it is marked,
and its next use of gradwire raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import msgspec

from gradwire.agent.pool import Job
from gradwire.ids import WorkerId
from gradwire.transport.base import Channel


class Source(msgspec.Struct, eq=False):
    """Whence a message came; what `Agent.answer` needs to send its answer back."""

    worker: WorkerId
    channel: Channel
    request: int
    cancelled: str = ""
    """why nobody waits for the answer any more, once that is so"""


@final
class Errands:
    """Of one worker, by who asked and the number it asked under."""

    def __init__(self) -> None:
        self._open: dict[tuple[WorkerId, int], Source] = {}

    def __len__(self) -> int:
        return len(self._open)

    def came(self, errand: Source) -> None:
        """It will be run.

        hot: every call served
        """
        self._open[errand.worker, errand.request] = errand

    def run(self, errand: Source, job: Job) -> None:
        """Do it, unless it was called off, and forget it.

        hot: every call served
        """
        try:
            if not errand.cancelled:
                job()
        finally:
            self._open.pop((errand.worker, errand.request), None)

    def goes_on(self, errand: Source) -> None:
        """From now on it is done whoever waits for it."""
        self._open.pop((errand.worker, errand.request), None)

    def asked_by(self, worker: WorkerId, channel: Channel, requests: Iterable[int]) -> list[Source]:
        """Those of these that are still open; they came by this channel."""
        found = [self._open.get((worker, n)) for n in requests]
        return [errand for errand in found if errand is not None and errand.channel is channel]

    def of_channel(self, channel: Channel) -> list[Source]:
        """All that came by a channel."""
        return [errand for errand in list(self._open.values()) if errand.channel is channel]
