"""Sets of edges: what a tensor depends on, through all workers.

A lineage is never changed in place. Each worker numbers its edges for ever, so a lineage is sparse:
a dict from the number of a chunk to its 512 bits. A step of a recurrent state copies the dict and
changes one chunk; the others are shared. Larger chunks make the numbers of each crossing longer,
smaller ones the dicts of a state that is never detached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradwire.errors import BadMessage
from gradwire.ids import LAST_WORKER, EdgeId, WorkerId

Lineage = dict[int, int]
Wire = dict[int, bytes]
"""A lineage as it is sent: the bytes of each chunk. msgpack has no integers over 64 bits."""
NOTHING: Lineage = {}

_WORKER_BITS = 48
"""An edge is one place in a row of bits: its worker's number, then its own, of so many bits."""
_CHUNK_BITS = 9
_IN_CHUNK = (1 << _CHUNK_BITS) - 1
_KEY_BITS = _WORKER_BITS - _CHUNK_BITS
_NUMBER = (1 << _WORKER_BITS) - 1
_CHUNK_BYTES = 1 << _CHUNK_BITS - 3
_ALL_KEY_BITS = LAST_WORKER.bit_length() + _KEY_BITS


def one(edge: EdgeId) -> Lineage:
    """This edge alone."""
    return plus(NOTHING, edge)


def plus(lineage: Lineage, edge: EdgeId) -> Lineage:
    """The lineage of what crosses by this edge."""
    place = edge.worker << _WORKER_BITS | edge.n
    chunk = place >> _CHUNK_BITS
    return {**lineage, chunk: lineage.get(chunk, 0) | 1 << (place & _IN_CHUNK)}


def union(lineages: Iterable[Lineage]) -> Lineage:
    """The union of all; if only one of them is not empty, that object itself is returned."""
    total = NOTHING
    for lineage in lineages:
        if lineage is total or not lineage:
            continue
        if not total:
            total = lineage
            continue
        merged = total | lineage
        for chunk in total.keys() & lineage.keys():
            merged[chunk] = total[chunk] | lineage[chunk]
        total = merged
    return total


def minus(lineage: Lineage, other: Lineage) -> Lineage:
    """The edges that are not in the other."""
    left = {}
    for chunk, bits in lineage.items():
        rest = bits & ~other.get(chunk, 0)
        if rest:
            left[chunk] = rest
    return left


def meets(lineage: Lineage, other: Lineage) -> bool:
    """Whether they have an edge in common."""
    return any(bits & other.get(chunk, 0) for chunk, bits in lineage.items())


def has(lineage: Lineage, edge: EdgeId) -> bool:
    """Whether it is one of these."""
    place = edge.worker << _WORKER_BITS | edge.n
    return bool(lineage.get(place >> _CHUNK_BITS, 0) >> (place & _IN_CHUNK) & 1)


def of_worker(lineage: Lineage, worker: WorkerId) -> Lineage:
    """The edges that this worker has sent. hot: each crossing and each pass"""
    found = {}
    for chunk, bits in lineage.items():
        if chunk >> _KEY_BITS == worker:
            found[chunk] = bits  # noqa: PERF403  (a comprehension is one more call)
    return found


def by_worker(lineage: Lineage) -> dict[WorkerId, Lineage]:
    """The edges that each worker has sent."""
    found: dict[WorkerId, Lineage] = {}
    for chunk, bits in lineage.items():
        worker = chunk >> _KEY_BITS
        if worker in found:
            found[worker][chunk] = bits
        else:
            found[worker] = {chunk: bits}
    return found


def latest(lineage: Lineage) -> int:
    """The greatest number among the edges of one worker."""
    chunk = max(lineage)
    return (chunk << _CHUNK_BITS & _NUMBER) + lineage[chunk].bit_length() - 1


def numbers(lineage: Lineage) -> Iterator[int]:
    """The numbers of the edges of one worker, lowest first."""
    for chunk in sorted(lineage):
        bits, first = lineage[chunk], chunk << _CHUNK_BITS & _NUMBER
        while bits:
            lowest = bits & -bits
            yield first + lowest.bit_length() - 1
            bits ^= lowest


def latest_numbers(lineage: Lineage, most: int) -> list[int]:
    """The greatest numbers among the edges of one worker, highest first."""
    found: list[int] = []
    for chunk in sorted(lineage, reverse=True):
        bits, first = lineage[chunk], chunk << _CHUNK_BITS & _NUMBER
        while bits:
            if len(found) == most:
                return found
            top = bits.bit_length() - 1
            found.append(first + top)
            bits ^= 1 << top
    return found


def size(lineage: Lineage) -> int:
    """How many edges there are."""
    return sum(bits.bit_count() for bits in lineage.values())


def to_wire(lineage: Lineage) -> Wire:
    """As it is sent. hot: each crossing and each pass"""
    sent = {}
    for chunk, bits in lineage.items():
        sent[chunk] = bits.to_bytes(bits.bit_length() + 7 >> 3, "little")
    return sent


def from_wire(sent: Wire) -> Lineage:
    """Back from the wire; BadMessage for what is no lineage."""
    lineage: Lineage = {}
    for chunk, data in sent.items():
        bits = lineage[chunk] = int.from_bytes(data, "little")
        # A negative number is no less outside when it is shifted.
        if not bits or len(data) > _CHUNK_BYTES or chunk >> _ALL_KEY_BITS:
            raise BadMessage("a lineage is malformed")
    return lineage
