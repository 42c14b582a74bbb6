"""Walks the local graph: what a tensor depends on, and in which order its nodes must run.

Note [The order of waiting]

A Send waits in its backward, so its place in the engine's queue matters. The engine takes the ready
node with the highest sequence number. An edge has a depth, one more than the deepest edge it
depends on. A Send is numbered by its depth, and every other node is lifted above the depth it
depends on. Then nothing that could run stands behind a wait, and of the Sends the deepest waits
first. No dead-lock: take, over all workers, the waiting Send of greatest depth; what it waits for
is deeper still, hence not waiting, hence running.

Of edges that do not depend on each other, a later one is deeper than those its worker sent before,
as long as there is room: so the workers of a pipeline take its micro-batches in one order, the last
first, as one process would, and none waits for one that comes late while another has come.

Ordinary numbers are per thread and start at 0, so a thread that enters a context makes room for the
depths of most programs, and one that receives moves its count above the depth it received. What is
left: a thread outside of the context, or one that never received in a program deeper than that
room, makes nodes on tensors that another thread received; they are lifted only when they are sent
on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, final

import msgspec
import torch

from gradwire.autograd.lineage import NOTHING, Lineage, union
from gradwire.autograd.torch_private import (
    CHECKPOINT,
    DDP_SINK,
    AccumulateGrad,
    Node,
    lift,
    sequence_number,
)


class Landmarks(NamedTuple):
    """What a walk has met that a run must know of beforehand."""

    accumulators: list[Node]
    checkpoints: list[Node]
    """those whose backward runs a backward of its own"""
    sinks: list[Node]
    """those of data-parallel modules that may not use all of their parameters"""


class Origin(msgspec.Struct, frozen=True):
    """What a node depends on: the edges, and the greatest depth among them."""

    lineage: Lineage
    depth: int


ROOM = 1000
"""The depths of most programs: a thread that enters a context makes its nodes above them."""

FROM_HERE = Origin(NOTHING, 0)
RecvOrigin = Callable[[Node], Origin]
"""Where what a Recv has received came from."""


@final
class Walk:
    """Remembers every node it has seen, so that each is visited once per context.

    A node's next functions never change, so neither does its origin. The nodes are held until the
    context closes.
    """

    def __init__(self, recv: type[Node], recv_origin: RecvOrigin) -> None:
        self._recv, self._recv_origin = recv, recv_origin
        self._known: dict[Node, Origin] = {}
        self._accumulators: list[Node] = []
        self._checkpoints: list[Node] = []
        self._sinks: list[Node] = []

    def landmarks(self) -> Landmarks:
        """What it has met so far."""
        return Landmarks(list(self._accumulators), list(self._checkpoints), list(self._sinks))

    def origin(self, nodes: Iterable[Node | None]) -> Origin:
        """What these depend on together; lifts every node on the way.

        hot: one visit for each new node of the graph behind what leaves
        """
        known = self._known
        return _together([known.get(n) or self._visit(n) for n in nodes if n is not None])

    def behind(self, node: Node) -> Origin:
        """What a node's inputs depend on together."""
        parents = node.next_functions
        if len(parents) == 1:
            parent = parents[0][0]
            if parent is not None:
                return self._known.get(parent) or self._visit(parent)
        return self.origin([parent for parent, _ in parents])

    def note(self, node: Node, origin: Origin) -> None:
        """What a new Recv depends on."""
        self._known[node] = origin

    def _visit(self, root: Node) -> Origin:
        known = self._known
        todo = [root]
        while todo:
            node = todo.pop()
            if node in known:
                continue
            kind = type(node)
            if kind is AccumulateGrad:
                self._accumulators.append(node)
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
                self._checkpoints.append(node)
            elif kind is DDP_SINK:
                self._sinks.append(node)
            origin = known[node] = _together([known[parent] for parent in parents])
            lift(node, origin.depth)
        return known[root]


def _together(origins: list[Origin]) -> Origin:
    if len(origins) == 1:
        return origins[0]
    if not origins:
        return FROM_HERE
    return Origin(union(o.lineage for o in origins), max(o.depth for o in origins))


@final
class _Thread(threading.local):
    above = 0
    """the depth that what this thread makes stands above, as far as it has looked"""


_thread = _Thread()


def lift_this_thread(depth: int) -> None:
    """Let what this thread makes from now on stand above a depth.

    Only making a node moves a thread's count, and tells it. A thread that stays with a context
    makes one for each edge.
    """
    if depth <= _thread.above:
        return
    with torch.inference_mode(False), torch.enable_grad():
        seed = torch.zeros((), requires_grad=True)
        while (number := sequence_number(_made_of(seed))) < depth:
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


def _made_of(seed: torch.Tensor) -> Node:
    node = seed.view(()).grad_fn
    assert node is not None
    return node
