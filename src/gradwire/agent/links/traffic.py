"""The bytes that one worker and its peers have sent each other, over all their channels.

A channel counts its own. When it ends, its counts are added to what ended before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, final

from gradwire.ids import WorkerId

PeerAndWay = tuple[WorkerId, str]


class Carrier(Protocol):
    """A channel, as far as it counts."""

    def carried(self) -> Mapping[str, tuple[int, int]]:
        """The bytes sent and received, by way."""


@final
class Traffic:
    """The sums of channels that have ended. Pure: its owner holds the lock."""

    def __init__(self) -> None:
        self._sent: Counter[PeerAndWay] = Counter()
        self._received: Counter[PeerAndWay] = Counter()

    def ended(self, peer: WorkerId, channels: Iterable[Carrier]) -> None:
        """These channels to the peer are used no more: what they carry from now on is lost."""
        _add(self._sent, self._received, peer, channels)

    def with_open(
        self, channels: Mapping[WorkerId, Sequence[Carrier]]
    ) -> dict[PeerAndWay, tuple[int, int]]:
        """The bytes sent and received, by peer and way; those of these open channels included."""
        sent, received = self._sent.copy(), self._received.copy()
        for peer, known in channels.items():
            _add(sent, received, peer, known)
        return {key: (sent[key], received[key]) for key in sent}


def _add(
    sent: Counter[PeerAndWay],
    received: Counter[PeerAndWay],
    peer: WorkerId,
    channels: Iterable[Carrier],
) -> None:
    for channel in channels:
        for way, (out, into) in channel.carried().items():
            sent[peer, way] += out
            received[peer, way] += into
