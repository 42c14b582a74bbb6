"""Sets of edges: what a tensor depends on, through all workers.

A lineage is never changed in place. Each worker numbers its edges for ever, so a lineage is sparse:
a dict from the number of a chunk to its 4096 bits. A step of a recurrent state copies the dict and
changes one chunk; the others are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradwire.errors import BadMessage
from gradwire.ids import LAST_WORKER, EdgeId, WorkerId

Lineage = dict[int, int]
Wire = dict[int, bytes]
"""A lineage as it is sent: for each chunk the place of its first byte that is not 0, and the bytes
from there. msgpack has no integers over 64 bits."""
NOTHING: Lineage = {}

_WORKER_BITS = 48
"""An edge is one place in a row of bits: its worker's number, then its own, of so many bits."""
_CHUNK_BITS = 12
_IN_CHUNK = (1 << _CHUNK_BITS) - 1
_KEY_BITS = _WORKER_BITS - _CHUNK_BITS
_NUMBER = (1 << _WORKER_BITS) - 1
_CHUNK_BYTES = 1 << _CHUNK_BITS - 3
_PLACE_BITS = LAST_WORKER.bit_length() + _WORKER_BITS - 3
"""Of the place of a byte in that row."""


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


def to_wire(lineage: Lineage) -> Wire:
    """As it is sent."""
    sent = {}
    for chunk, bits in lineage.items():
        end = bits.bit_length() + 7 >> 3
        data = bits.to_bytes(end, "little").lstrip(b"\0")
        sent[chunk * _CHUNK_BYTES + end - len(data)] = data
    return sent


def from_wire(sent: Wire) -> Lineage:
    """Back from the wire; BadMessage for what is no lineage."""
    lineage: Lineage = {}
    for start, data in sent.items():
        chunk, empty = divmod(start, _CHUNK_BYTES)
        bits = int.from_bytes(data, "little")
        # A negative place is no less outside when it is shifted.
        if start >> _PLACE_BITS or empty + len(data) > _CHUNK_BYTES or not bits or chunk in lineage:
            raise BadMessage("a lineage is malformed")
        lineage[chunk] = bits << (empty << 3)
    return lineage
