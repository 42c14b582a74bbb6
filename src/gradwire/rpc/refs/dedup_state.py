"""Which questions may still be repeated, so that none counts twice.

Rules of this file:
  1. Pure. No threads, no clock: it sees numbers.
  2. What it remembers of a peer is what that peer may still say again, and no more.

A holder asks the owner of a value to count a fork, and asks again until it has heard the answer. A
late copy of the question must not count again what was dropped meanwhile. So questions are numbered
in the order in which they are first asked, and with all that it says a holder tells its *floor*:
below that number it has heard all answers. The owner remembers what it was asked from the floor on,
by its value; an older question it knows by its number alone.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import final

from gradwire.ids import ForkId, RefId, WorkerId

Counted = tuple[RefId, ForkId]


@final
class Asking:
    """What one worker has asked others, from `first` on, and not heard an answer to."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._open: dict[WorkerId, dict[int, None]] = {}

    def asked(self, owner: WorkerId) -> int:
        """The number of a new question."""
        n = self._next
        self._next += 1
        self._open.setdefault(owner, {})[n] = None
        return n

    def settled(self, owner: WorkerId, n: int) -> None:
        """It is not asked any more."""
        waiting = self._open[owner]
        del waiting[n]
        if not waiting:
            del self._open[owner]

    def floor(self, owner: WorkerId) -> int:
        """Nothing below this is asked any more."""
        return next(iter(self._open.get(owner, ())), self._next)


@final
class Asked:
    """What others have asked one worker to count, and may ask again."""

    def __init__(self) -> None:
        self._floors: dict[WorkerId, int] = {}
        self._recent: dict[WorkerId, list[tuple[int, Counted]]] = {}
        """by holder, as heaps"""

    def __len__(self) -> int:
        return sum(map(len, self._recent.values()))

    def note(self, holder: WorkerId, n: int, counted: Counted) -> None:
        """A fork was counted, as was asked by this question."""
        heappush(self._recent.setdefault(holder, []), (n, counted))

    def is_old(self, holder: WorkerId, n: int) -> bool:
        """Whether the holder has heard the answer to this."""
        return n < self._floors.get(holder, 0)

    def settled_below(self, holder: WorkerId, floor: int) -> list[Counted]:
        """A holder tells its floor: what it will not ask again."""
        self._floors[holder] = max(floor, self._floors.get(holder, 0))
        recent = self._recent.get(holder, [])
        settled = []
        while recent and recent[0][0] < floor:
            settled.append(heappop(recent)[1])
        if not recent:
            self._recent.pop(holder, None)
        return settled

    def lost(self, holder: WorkerId) -> list[Counted]:
        """Of a worker that is gone: nothing that it has asked is heard again."""
        self._floors.pop(holder, None)
        return [counted for _, counted in self._recent.pop(holder, [])]

    def of(self, holder: WorkerId) -> list[Counted]:
        """What one of them may ask again."""
        return [counted for _, counted in self._recent.get(holder, [])]
