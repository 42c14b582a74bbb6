"""What was refused, by kind and peer: counted each time, told the first time."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final, final

_MOST_PEERS: Final = 4096
"""Kinds and peers that are told apart; strangers choose the names of peers."""


@final
class Refusals:
    """Of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()

    def count(self, kind: str, peer: str) -> bool:
        """One more; True if it is the first of its kind from this peer, and should be logged."""
        with self._lock:
            self._counts[kind] += 1
            if (kind, peer) in self._told or len(self._told) >= _MOST_PEERS:
                return False
            self._told.add((kind, peer))
            return True

    def seen(self) -> dict[str, int]:
        """How often each kind was refused."""
        with self._lock:
            return dict(self._counts)
