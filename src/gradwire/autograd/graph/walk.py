"""Walks the local graph: what a tensor depends on, and in which order its nodes must run.

Note [The order of waiting]

A Send waits in its backward, on the thread that executes the engine run, so its place in the
engine's queue matters. Each edge has a depth that is greater than the depth of every edge it
depends on (`Context.next_depth`). The depth of a node is that of the deepest edge it depends on,
and never changes; the depth of a Send is that of its edge. torch's engine runs ready nodes by
sequence number, highest first. The sequence number of a Send is set to its depth; that of every
other node of an engine run that contains a Send or Recv is greater than its depth. Then workers do
not deadlock:

 1. A run executes on one thread, from one queue, which gives the ready node with the greatest
    number (std::priority_queue in torch's ReadyQueue; nodes of a reentrant (nested) backward come
    first). So when a Send of depth k waits, no node of depth k or more is ready in its run: such a
    node would have a greater number, and so would a Send of an edge that depends on this one.
 2. Suppose that waiting Sends wait for ever. Take the deepest, over all workers, of depth k. Its
    gradients are missing because a node that depends on its edge has not run. Among these nodes
    take one that waits for none of the others: it is ready, its depth is at least k, and if it is a
    Send its depth is greater than k. Its run has not executed it, so the run is blocked in a Send;
    by (1) that Send is deeper than k, a contradiction. A run that has not begun begins when its
    Start arrives, and one that executes a node of the user's goes on when that returns.
 3. Passes do not wait for each other: each has a run of its own on every worker, and a run inside
    another waits for what belongs to its own pass.

Two things make (1) true. Numbers are right before a run begins: those of the nodes behind a Send
are set when the Send is made, by a walk to the Recvs (`Walk`), and those of the nodes between the
roots of a run and the first Recvs when the run begins (`engine_run.number_nodes`). It does not
matter which threads made the nodes. And numbers do not change while their nodes are in the queue,
which would corrupt std::priority_queue: a number is changed at most once, to one more than the
depth, by the first walk; another walk finds it greater than the depth and leaves it. What failed
runs leave in a queue is dropped.

Only a run that C++ code begins is not prepared. Its numbers are right where all of its nodes were
made by threads that entered the context or received what they used, see below. Where they are not,
and a Send would wait before a Recv of the same depth or a greater one has run, it raises
(`reach.check_order`): by (1) that happens only if the order is wrong.

The rest is for speed. Of edges that do not depend on each other, a later one is deeper than those
its worker sent before, up to depth ROOM/2. So all pipeline workers process micro-batches in the
same order, last first, as one process would, and none blocks on a gradient that has not arrived
while another is available. torch counts sequence numbers per thread, from 0. A thread that enters a
context advances its sequence counter past ROOM, and one that receives advances it past the depth it
received: so most nodes keep the numbers that torch gave them, and run in the order that they would
have in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, final

import msgspec
import torch

from gradwire.ids import EdgeId, WorkerId
from gradwire.torch_private import (
    CHECKPOINT,
    DDP_SINK,
    AccumulateGrad,
    Node,
    lift,
    recording,
    sequence_number,
)

Lineage = dict[WorkerId, int]
"""The edges a tensor depends on, through all workers; never changed in place.

One bitset per worker: the n-th bit stands for that worker's n-th edge of the context. 10 000 edges
are 1.3 kB, and a union or intersection is one Python integer operation.
"""
NOTHING: Lineage = {}


class Landmarks(NamedTuple):
    """The nodes met by a walk that a run must know before it begins."""

    accumulators: list[Node]
    checkpoints: list[Node]
    """those of reentrant activation checkpoints, whose backward runs another backward"""
    sinks: list[Node]
    """DDP's sink nodes (`find_unused_parameters=True`)"""


NO_LANDMARKS = Landmarks([], [], [])


class Origin(msgspec.Struct, frozen=True):
    """What a node depends on: the edges, and the greatest depth among them."""

    lineage: Lineage
    depth: int


ROOM = 1000
"""The depths of most programs: a thread that enters a context makes its nodes above them."""

FROM_HERE = Origin(NOTHING, 0)
RecvOrigin = Callable[[Node], Origin]
"""What the tensors of a Recv depend on."""


@final
class Walk:
    """Remembers every node it has seen, so that each is visited once per context.

    A node's next functions never change, so neither does its origin. The nodes are held until the
    context closes. See Note [A context is not locked], context.py.
    """

    def __init__(self, recv: type[Node], recv_origin: RecvOrigin) -> None:
        self._recv, self._recv_origin = recv, recv_origin
        self.known: dict[Node, Origin] = {}
        # Dicts as ordered sets: a node that two threads visit at once must be listed once.
        self._met: tuple[dict[Node, None], dict[Node, None], dict[Node, None]] = ({}, {}, {})

    def landmarks(self) -> Landmarks:
        """What it has met so far."""
        return Landmarks(*map(list, self._met))

    def origin(self, nodes: Iterable[Node | None]) -> Origin:
        """What these depend on; raises sequence numbers above the depth. hot: for each new node"""
        known = self.known
        return _together([known.get(n) or self._visit(n) for n in nodes if n is not None])

    def behind(self, node: Node) -> Origin:
        """What a node's inputs depend on together."""
        parents = node.next_functions
        if len(parents) == 1:
            parent = parents[0][0]
            if parent is not None:
                return self.known.get(parent) or self._visit(parent)
        return self.origin([parent for parent, _ in parents])

    def _visit(self, root: Node) -> Origin:
        known = self.known
        accumulators, checkpoints, sinks = self._met
        todo = [root]
        while todo:
            node = todo.pop()
            if node in known:
                continue
            kind = type(node)
            if kind is AccumulateGrad:
                accumulators[node] = None
                known[node] = FROM_HERE
                continue
            if kind is self._recv:
                known[node] = self._recv_origin(node)
                continue
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            missing = [parent for parent in parents if parent not in known]
            if missing:
                todo.append(node)
                todo += missing
                continue
            if kind is CHECKPOINT:
                checkpoints[node] = None
            elif kind is DDP_SINK:
                sinks[node] = None
            origin = known[node] = _together([known[parent] for parent in parents])
            lift(node, origin.depth)
        return known[root]


def reachable_from(roots: Iterable[Node]) -> list[Node]:
    """These nodes and all nodes reachable through next_functions."""
    found = dict.fromkeys(roots)
    left = list(found)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                left.append(node)
    return list(found)


def _together(origins: list[Origin]) -> Origin:
    if len(origins) == 1:
        return origins[0]
    if not origins:
        return FROM_HERE
    return Origin(union(o.lineage for o in origins), max(o.depth for o in origins))


@final
class _ThreadDepth(threading.local):
    above = 0
    """a lower bound of this thread's sequence counter"""


_thread = _ThreadDepth()


def lift_this_thread(depth: int) -> None:
    """Create nodes until this thread's sequence numbers are above a depth.

    Torch has no API to read or set a thread's sequence counter. A thread that stays in one context
    creates about one extra node per edge.
    """
    if depth <= _thread.above:
        return
    with recording():
        seed = torch.zeros((), requires_grad=True)
        while (number := sequence_number(node_of(seed.view(())))) < depth:
            pass
    _thread.above = number  # a thread's count never goes back


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a value, inside plain containers too."""
    match value:
        case torch.Tensor():
            yield value
        case list() | tuple():
            for item in value:
                yield from tensors_in(item)
        case dict():
            yield from tensors_in(list(value.values()))
        case _:
            pass


def node_of(tensor: torch.Tensor) -> Node:
    """The grad_fn of a tensor; it must not be None."""
    node = tensor.grad_fn
    assert node is not None
    return node


# -- lineages


def union(lineages: Iterable[Lineage]) -> Lineage:
    """The union of all; if only one of them is not empty, that object itself is returned."""
    total = NOTHING
    for lineage in lineages:
        if lineage is total or not lineage:
            continue
        if not total:
            total = lineage
            continue
        total = dict(total)
        for worker, edges in lineage.items():
            total[worker] = total.get(worker, 0) | edges
    return total


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
    """As it is sent: msgpack has no integers over 64 bits."""
    return {
        worker: edges.to_bytes((edges.bit_length() + 7) // 8, "little")
        for worker, edges in lineage.items()
    }


def from_wire(data: dict[WorkerId, bytes]) -> Lineage:
    """Back from the wire."""
    return {worker: int.from_bytes(edges, "little") for worker, edges in data.items()}


def bits_to_wire(edges: int) -> bytes:
    """One worker's edges as they are sent."""
    return edges.to_bytes((edges.bit_length() + 7) // 8, "little")


def bits_from_wire(data: bytes) -> int:
    """One worker's edges, back from the wire."""
    return int.from_bytes(data, "little")
