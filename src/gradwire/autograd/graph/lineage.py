"""Lineage: the edges a tensor depends on, through all workers. Pure.

One bitset per worker, a Python int whose n-th bit stands for that worker's n-th edge of the
context. 10 000 edges are 1.3 kB, and the operations below are single instructions on them.
A lineage is never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradwire.ids import EdgeId, WorkerId

Lineage = dict[WorkerId, int]
NOTHING: Lineage = {}


def union(lineages: Iterable[Lineage]) -> Lineage:
    """All edges of all of them. One that is alone, or holds the rest, is given back as it is."""
    total = NOTHING
    for lineage in lineages:
        if lineage is total or not lineage:
            continue
        total = _merged(total, lineage) if total else lineage
    return total


def _merged(a: Lineage, b: Lineage) -> Lineage:
    merged = dict(a)
    for worker, edges in b.items():
        merged[worker] = merged.get(worker, 0) | edges
    return merged


def plus(lineage: Lineage, edge: EdgeId) -> Lineage:
    """The lineage of what crosses by this edge."""
    return {**lineage, edge.worker: lineage.get(edge.worker, 0) | 1 << edge.n}


def meets(lineage: Lineage, worker: WorkerId, edges: int) -> bool:
    """Whether it depends on any of these edges of a worker."""
    return bool(lineage.get(worker, 0) & edges)


def numbers(edges: int) -> Iterator[int]:
    """The numbers of the edges in a bitset, lowest first."""
    while edges:
        lowest = edges & -edges
        yield lowest.bit_length() - 1
        edges ^= lowest


def to_wire(lineage: Lineage) -> dict[WorkerId, bytes]:
    """As it travels: msgpack has no integers over 64 bits."""
    return {
        worker: edges.to_bytes((edges.bit_length() + 7) // 8, "little")
        for worker, edges in lineage.items()
    }


def from_wire(data: dict[WorkerId, bytes]) -> Lineage:
    """Back from the wire."""
    return {worker: int.from_bytes(edges, "little") for worker, edges in data.items()}


def bits_to_wire(edges: int) -> bytes:
    """One worker's edges as they travel."""
    return edges.to_bytes((edges.bit_length() + 7) // 8, "little")


def bits_from_wire(data: bytes) -> int:
    """One worker's edges, back from the wire."""
    return int.from_bytes(data, "little")
