"""How much of one kind of thing each peer has here: so much and no more."""

from __future__ import annotations

import threading
from typing import final

from gradwire.errors import OverLimit
from gradwire.ids import WorkerId


@final
class PeerLimit:
    """Of one kind of thing, which `what` names in the plural, as the limit of that name does."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most
        self._lock = threading.RLock()
        self._taken: dict[WorkerId, int] = {}

    def take(self, peer: WorkerId, count: int = 1) -> None:
        """So many more; OverLimit, and nothing is taken, if that is over the limit."""
        counts = self._taken
        with self._lock:  # no calls in here, see docs/threads.md
            taken = counts[peer] + count if peer in counts else count
            is_over = taken > self._most
            if not is_over:
                counts[peer] = taken
        if is_over:
            raise over(self._what, self._most)

    def give_back(self, peer: WorkerId, count: int = 1) -> None:
        """So many are gone."""
        counts = self._taken
        with self._lock:
            if peer in counts:
                counts[peer] -= count
                if counts[peer] <= 0:
                    del counts[peer]

    def taken(self, peer: WorkerId) -> int:
        """How many there are."""
        return self._taken.get(peer, 0)


def over(what: str, most: int) -> OverLimit:
    """The refusal of one too many."""
    return OverLimit(
        f"a peer has {most} {what} open here already, which is the limit",
        hint=f"end some of them, or raise Limits({what}=…) on the worker that refused",
    )
