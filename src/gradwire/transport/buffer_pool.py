"""Memory for received payloads, used again once its last reader is gone.

Fresh pages cost as much as the bytes that are read into them, so blocks are kept and lent again.
A block is lent as one memoryview, and comes back when that very object dies: whatever is built on
it must keep it alive, as `torch.frombuffer` does. This file must not know what the bytes are.

Rules of this file:
  1. A view may die in any thread, also inside the garbage collector and in the middle of `take`.
     So nothing here locks: deques and dicts are changed by single atomic operations, and bytes are
     counted afresh each time rather than kept in a number that two threads could spoil.
  2. Being wrong means freeing a block, never lending it twice.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TypeAlias, final

import numpy
from numpy.typing import NDArray

from gradwire.wire.frame import ALIGNMENT

# numpy rather than bytearray, which writes zeros all over a new block: twice the work, and a peer's
# mere promise of a large payload would make us touch that much memory.
_Memory: TypeAlias = NDArray[numpy.uint8]

_SMALLEST = 4096
SMALL_BLOCK = _SMALLEST // 4
"""What is larger has a block of its own."""
# What sys.getrefcount says of a block that only _came_back's own variable refers to.
_UNSHARED = 2


@final
class _Shelf:
    """The blocks of one size that nobody uses."""

    __slots__ = ("blocks", "last_use", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: deque[_Memory] = deque()
        self.last_use = 0


@final
class BlockPool:
    """Lends writable blocks and keeps up to `cached_bytes` of those that came back."""

    def __init__(self, cached_bytes: int = 1 << 28) -> None:
        self._limit = cached_bytes
        # Replaced, never changed: whoever walks over it has a dict that stands still. When two
        # threads replace it at once a shelf may be forgotten, and its blocks with it (rule 2).
        self._shelves: dict[int, _Shelf] = {}
        self._lent: dict[int, tuple[weakref.ref[memoryview], _Shelf, _Memory]] = {}
        self._clock = count(1)

    @property
    def cached(self) -> int:
        """Bytes that wait to be lent again."""
        return sum(shelf.size * len(shelf.blocks) for shelf in self._shelves.values())

    def take(self, nbytes: int) -> memoryview:
        """Exactly `nbytes` writable bytes, aligned, with old contents; yours until the view dies.

        hot: every received payload
        """
        size = _SMALLEST if nbytes <= _SMALLEST else size_class(nbytes)
        shelf = self._shelves.get(size) or self._shelf_for(size)
        shelf.last_use = next(self._clock)
        try:
            memory = shelf.blocks.pop()
        except IndexError:
            memory = _aligned(shelf.size)
        view = memory.data[:nbytes]
        lease = weakref.ref(view, self._came_back)
        # Keyed by id because a weak reference to a writable view has no hash.
        self._lent[id(lease)] = (lease, shelf, memory)
        return view

    def _shelf_for(self, size: int) -> _Shelf:
        shelf = self._shelves.get(size)
        if shelf is None:
            shelf = _Shelf(size)
            self._shelves = {**self._shelves, size: shelf}
        return shelf

    def _came_back(self, lease: weakref.ref[memoryview]) -> None:
        _, shelf, memory = self._lent.pop(id(lease))
        # Views sliced from the lent one do not keep it alive, but they do hold the memory; a block
        # that someone still sees is left to them.
        if shelf.size > self._limit or sys.getrefcount(memory) > _UNSHARED:
            return
        shelf.blocks.append(memory)
        # Small payloads are many: as long as theirs are few, all are not counted for each.
        if shelf.size > _SMALLEST or 64 * _SMALLEST * len(shelf.blocks) > self._limit:
            while self.cached > self._limit:
                self._free_one()

    def _free_one(self) -> None:
        stocked = [shelf for shelf in self._shelves.values() if shelf.blocks]
        # Either may come too late: another thread took or freed the last block meanwhile.
        with suppress(ValueError, IndexError):
            min(stocked, key=lambda shelf: shelf.last_use).blocks.popleft()


@final
class Slab:
    """Small blocks side by side in one of the smallest size, which goes with the last of them.

    A block that is kept so holds no more memory than one of the pool would, and is had without a
    lease. One thread at a time takes.
    """

    __slots__ = ("_memory", "_used")

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._used = _SMALLEST

    def take(self, nbytes: int) -> memoryview:
        """Exactly `nbytes` writable bytes, aligned; at most `SMALL_BLOCK`.

        hot: every small payload received
        """
        begin = self._used
        end = begin + nbytes
        if end > _SMALLEST:
            self._memory = _aligned(_SMALLEST).data
            begin, end = 0, nbytes
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._memory[begin:end]


def size_class(nbytes: int) -> int:
    """The size of block that holds `nbytes`: four to each doubling, so at most a quarter is unused.

    >>> [size_class(n) for n in (0, 4096, 4097, 5000, 5121, 8193)]
    [4096, 4096, 5120, 5120, 6144, 10240]
    """
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _aligned(size: int) -> _Memory:
    memory = numpy.empty(size + ALIGNMENT, dtype=numpy.uint8)
    offset = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[offset : offset + size]
