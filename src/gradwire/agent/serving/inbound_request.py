"""What peers have asked for that is queued or runs here, so that it can be called off.

An inbound request that has not begun is dropped. One that runs cannot be stopped from outside: it
is marked, and its next use of gradwire raises.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import final

import msgspec

from gradwire.ids import WorkerId
from gradwire.transport.base import Channel


class Source(msgspec.Struct, eq=False):
    """Whence a message came; what `Agent.answer` needs to send its answer back."""

    worker: WorkerId
    channel: Channel
    request: int
    cancelled: str = ""
    """why nobody waits for the answer any more, once that is so"""
    note: bytes = b""
    """what the layer above sends home along with its answer, or with its failure"""


@final
class InboundRequests:
    """Of one worker. Few operations, each of them one step: there is no lock."""

    def __init__(self) -> None:
        self._open: set[Source] = set()
        self.came = self._open.add
        """it will be run; hot: every call served"""
        self.over = self._open.discard
        """it was run, or from now on goes on whoever waits for it; hot: every call served"""

    def asked_by(
        self, worker: WorkerId, channel: Channel, requests: Collection[int]
    ) -> list[Source]:
        """Those of these that are still open; they came by this channel."""
        mine = [inbound for inbound in self.of_channel(channel) if inbound.worker == worker]
        return [inbound for inbound in mine if inbound.request in requests]

    def of_channel(self, channel: Channel) -> list[Source]:
        """All that came by a channel."""
        return [inbound for inbound in list(self._open) if inbound.channel is channel]
