"""Walks the local graph: what a tensor depends on, and in which order its nodes must run.

Note [The order of waiting]

A Send waits in its backward, on the thread that executes the engine run, so its place in the
engine's queue matters. Each edge has a depth, greater than that of every edge it depends on
(`Edges.next_depth`). The depth of a node is that of the deepest edge it depends on, and never
changes; the depth of a Send is that of its edge. torch's engine runs ready nodes by sequence
number, highest first. The sequence number of a Send is set to its depth; that of every other node
of an engine run that contains a Send or Recv is greater than its depth. Then workers do not
deadlock:

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

Two things make (1) true, whichever threads made the nodes. Numbers are right before a run begins:
those of the nodes behind a Send are set when the Send is made, by a walk to the Recvs
(`origin_of`), and those between the roots of a run and the first Recvs when the run begins
(`engine_run.number_nodes`). And numbers do not change while their nodes are in the queue, which
would corrupt std::priority_queue: a number is changed at most once, to one more than the depth, by
the first walk. What failed runs leave in a queue is dropped.

Only a run that C++ code begins is not prepared. Its numbers are right where all of its nodes were
made by threads that entered a context or received what they used, see below. Where they are not,
and a Send would wait before a Recv of the same depth or a greater one has run, it raises
(`engine_run.check_order`): by (1) that happens only if the order is wrong.

The rest is for speed. Of edges that do not depend on each other, a later one is deeper than those
its worker sent before it since the last pass, up to depth ROOM/2. So all pipeline workers process
micro-batches in the same order, last first, and none blocks on a gradient that has not arrived
while another is available. torch counts sequence numbers per thread, from 0. A thread that enters a
context advances its counter past ROOM, and one that receives past the depth it received: so most
nodes keep torch's numbers, and run in the order that they would have in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, final

import msgspec
import torch

from gradwire.autograd.graph.lineage import NOTHING, Lineage, union
from gradwire.torch_private import AccumulateGrad, Node, advance_sequence_number, lift

ROOM = 1000
"""The depths of most programs: a thread that enters a context makes its nodes above them."""
_KEY = "gradwire"
_memo: Callable[[Node], dict[str, Origin]] = attrgetter("metadata")
"""torch's own dict of a node, which dies with it"""


class Origin(msgspec.Struct, frozen=True):
    """What a node depends on: the edges, and the greatest depth among them."""

    lineage: Lineage
    depth: int


FROM_HERE = Origin(NOTHING, 0)


def origin_of(nodes: Iterable[Node | None]) -> Origin:
    """What these depend on; raises sequence numbers above the depth. hot: for each new node

    Each node is visited once: its origin never changes. Two threads that walk over one node find
    the same, so there is no lock.
    """
    return _together([_memo(n).get(_KEY) or _visit(n) for n in nodes if n is not None])


def origin_behind(node: Node) -> Origin:
    """What a node's inputs depend on together."""
    behind = node.next_functions
    if len(behind) == 1 and (parent := behind[0][0]) is not None:  # most Sends
        return _memo(parent).get(_KEY) or _visit(parent)
    return origin_of([parent for parent, _ in behind])


def set_origin(node: Node, origin: Origin) -> None:
    """A Recv is made: a walk ends there."""
    _memo(node)[_KEY] = origin


def _visit(root: Node) -> Origin:
    if type(root) is AccumulateGrad:
        return FROM_HERE
    todo, origin = [root], FROM_HERE
    while todo:
        node = todo[-1]
        origins, missing = [], []
        for parent, _ in node.next_functions:
            if parent is None or type(parent) is AccumulateGrad:
                continue
            known = _memo(parent).get(_KEY)
            if known is None:
                missing.append(parent)
            else:
                origins.append(known)
        if missing:
            todo += missing
            continue
        origin = _together(origins)
        lift(node, origin.depth)
        _memo(node)[_KEY] = origin
        todo.pop()
    return origin


def reachable_from(roots: Iterable[Node]) -> list[Node]:
    """These nodes and all nodes reachable through next_functions."""
    seen: dict[Node | None, None] = dict.fromkeys(roots)
    found: list[Any] = list(seen)
    seen[None] = None  # an input that needs no gradient has no node
    for node in found:  # it grows meanwhile
        for behind, _ in node.next_functions:
            if behind not in seen:
                seen[behind] = None
                found.append(behind)
    return found


def _together(origins: list[Origin]) -> Origin:
    if len(origins) == 1:
        return origins[0]
    if not origins:
        return FROM_HERE
    return Origin(union([o.lineage for o in origins]), max([o.depth for o in origins]))


@final
class _ThreadDepth(threading.local):
    above = 0
    """a lower bound of this thread's sequence counter"""


_thread = _ThreadDepth()


def lift_this_thread(depth: int) -> None:
    """From now on this thread's nodes have sequence numbers above a depth."""
    if depth > _thread.above:  # a thread's count never goes back
        _thread.above = advance_sequence_number(depth + 1) - 1


def node_of(tensor: torch.Tensor) -> Node:
    """The grad_fn of a tensor; it must not be None."""
    node = tensor.grad_fn
    assert node is not None
    return node
