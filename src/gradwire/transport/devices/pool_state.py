"""Which block of device memory a message gets: the blocks of one device for one peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

_SMALLEST_ROOM = 1 << 20
_STEP = 1 << 26
_LOOSEST_FIT = 4
"""While another block may be made, one serves only what fills at least this part of it: a large
one is there when it is needed.
"""

IsFree = Callable[[int], bool]


def room_for(length: int) -> int:
    """The size of a new block: a power of two, or above 64 MiB a multiple of that."""
    if length > _STEP:
        return -(-length // _STEP) * _STEP
    return max(_SMALLEST_ROOM, 1 << (length - 1).bit_length())


@final
class DevicePool:
    """The blocks by their numbers. Whether one is free is known outside, as the peer decides it.

    Blocks are kept while the link lasts: to free one would take a message and its answer, and the
    sizes double, so that the small ones together take no more than the largest.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._rooms: dict[int, int] = {}
        """the least recently used first"""

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(self._rooms.values())

    def may_make(self, room: int) -> bool:
        """Whether the budget allows another block of this size."""
        return self.bytes + room <= self._budget

    def choose(self, length: int, is_free: IsFree) -> int | None:
        """The smallest free block that fits; of equals, the one that was used last."""
        room, last = room_for(length), next(reversed(self._rooms), -1)
        if self._rooms.get(last) == room and is_free(last):  # most often: none can be smaller
            return last
        most = max(_LOOSEST_FIT * length, _SMALLEST_ROOM)
        if not self.may_make(room):
            most = self._budget
        fits = [n for n, room in self._rooms.items() if length <= room <= most and is_free(n)]
        if not fits:
            return None
        best = min(reversed(fits), key=self._rooms.__getitem__)
        self._rooms[best] = self._rooms.pop(best)
        return best

    def added(self, number: int, room: int) -> None:
        """A block is being made."""
        self._rooms[number] = room

    def removed(self, number: int) -> None:
        """It could not be made."""
        del self._rooms[number]
