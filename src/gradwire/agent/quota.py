"""How much of one kind of thing each peer has here: so much and no more."""

from __future__ import annotations

import threading
from typing import final

from gradwire.errors import OverLimit
from gradwire.ids import WorkerId


@final
class Quota:
    """Of one kind of thing, which `what` names in the plural, as the limit of that name does."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most
        self._lock = threading.Lock()
        self._taken: dict[WorkerId, int] = {}

    def take(self, peer: WorkerId, count: int = 1) -> None:
        """So many more; OverLimit, and nothing is taken, if that is over the limit."""
        with self._lock:
            taken = self._taken.get(peer, 0) + count
            if taken > self._most:
                raise over(self._what, self._most)
            self._taken[peer] = taken

    def give_back(self, peer: WorkerId, count: int = 1) -> None:
        """So many are gone."""
        with self._lock:
            left = self._taken.get(peer, 0) - count
            if left > 0:
                self._taken[peer] = left
            else:
                self._taken.pop(peer, None)

    def taken(self, peer: WorkerId) -> int:
        """How many there are."""
        with self._lock:
            return self._taken.get(peer, 0)


def over(what: str, most: int) -> OverLimit:
    """The refusal of one too many."""
    return OverLimit(
        f"a peer has {most} {what} open here already, which is the limit",
        hint=f"end some of them, or raise Limits({what}=…) on the worker that refused",
    )
