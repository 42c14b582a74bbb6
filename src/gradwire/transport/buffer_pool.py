"""A pool of memory blocks for received payloads.

Fresh pages cost as much as reading bytes into them, so blocks are reused. A block is lent as a
memoryview and returns when the last view of it dies: everything built on the view must keep it
alive, as `torch.frombuffer` does.

Rules of this file:
  1. A view may die in any thread, inside the garbage collector and in the middle of `take`. So
     nothing here locks: deques and dicts are changed by single operations that are atomic under
     the GIL, and bytes are summed up each time, as a counter could be updated by two threads.
  2. A race may free a block, but never lend it twice.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias, final

import numpy
from numpy.typing import NDArray

from gradwire.wire.message import ALIGNMENT

# numpy.empty rather than bytearray, which fills a new block with zeros: that doubles the work, and
# the mere prefix of a large payload would make this process touch that much memory.
Memory: TypeAlias = NDArray[numpy.uint8]

_SMALLEST = 4096
SMALL_BLOCK = _SMALLEST // 4  # payloads up to this size share a block (`Slab`)


@dataclass(slots=True, eq=False)
class _Shelf:
    """The unused blocks of one size."""

    size: int
    blocks: deque[Memory] = field(default_factory=deque)
    last_use: int = 0


@final
class BlockPool:
    """Lends writable blocks, and caches up to `cached_bytes` of those returned."""

    def __init__(self, cached_bytes: int = 1 << 28) -> None:
        self._limit = cached_bytes
        # Replaced, never changed in place, so that iteration is safe. If two threads replace it at
        # once, one shelf and its blocks may be lost (rule 2).
        self._shelves: dict[int, _Shelf] = {}
        self._lent: dict[int, tuple[weakref.ref[Memory], _Shelf, Memory]] = {}
        self._clock = count(1)

    @property
    def cached(self) -> int:
        """Bytes of unused blocks."""
        return sum(shelf.size * len(shelf.blocks) for shelf in self._shelves.values())

    def take(self, nbytes: int) -> memoryview:
        """Lend exactly `nbytes` of aligned, uninitialized memory until the view dies.

        hot: every received payload
        """
        size = _SMALLEST if nbytes <= _SMALLEST else size_class(nbytes)
        shelf = self._shelves.get(size)
        if shelf is None:
            shelf = _Shelf(size)
            self._shelves = {**self._shelves, size: shelf}
        shelf.last_use = next(self._clock)
        try:
            memory = shelf.blocks.pop()
        except IndexError:
            memory = _aligned(shelf.size)
        # A slice of a memoryview refers to the array below, not to the view it was sliced from. So
        # the weak reference is to an array, which lives as long as any of them.
        array = memory[:nbytes]
        lease = weakref.ref(array, self._came_back)
        # Keyed by id because a weak reference to an array has no hash.
        self._lent[id(lease)] = (lease, shelf, memory)
        return array.data

    def _came_back(self, lease: weakref.ref[Memory]) -> None:
        lent = self._lent.pop(id(lease), None)
        if lent is None:  # a signal handler has raised in `take`
            return
        _, shelf, memory = lent
        if shelf.size > self._limit:
            return
        shelf.blocks.append(memory)
        # Small payloads are frequent: do not sum up the cache for each while it is small.
        if shelf.size > _SMALLEST or 64 * _SMALLEST * len(shelf.blocks) > self._limit:
            while self.cached > self._limit:
                stocked = [shelf for shelf in self._shelves.values() if shelf.blocks]
                # Either raises if another thread took or freed the last block meanwhile.
                with suppress(ValueError, IndexError):
                    min(stocked, key=lambda shelf: shelf.last_use).blocks.popleft()


@final
class Slab:
    """Cuts small blocks from one block of the smallest size, which is freed with the last of them.

    They need no weak reference. Only one thread at a time may call `take`.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._used = _SMALLEST

    def take(self, nbytes: int) -> memoryview:
        """Lend exactly `nbytes` of aligned memory; at most `SMALL_BLOCK`.

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
    """The block size for `nbytes`: four sizes per power of two, so at most a quarter is unused.

    >>> [size_class(n) for n in (0, 4096, 4097, 5000, 5121, 8193)]
    [4096, 4096, 5120, 5120, 6144, 10240]
    """
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _aligned(size: int) -> Memory:
    memory = numpy.empty(size + ALIGNMENT, dtype=numpy.uint8)
    offset = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[offset : offset + size]
