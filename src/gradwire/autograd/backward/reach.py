"""What an engine run of a pass reaches on this worker.

The coordinator asks from inside its run, at the first crossing: torch's engine knows which nodes it
will execute, see Note [Links], graph/crossing.py. A participant asks before its run begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

from gradwire.autograd.backward.engine_run import this_thread
from gradwire.autograd.graph.crossing import RECV, EdgeEnd, end_of
from gradwire.autograd.graph.edges import Edges, Sent
from gradwire.autograd.graph.lineage import Lineage, numbers
from gradwire.autograd.graph.walk import reachable_from
from gradwire.errors import PeerLost, UsageError
from gradwire.ids import EdgeId, WorkerId
from gradwire.torch_private import CHECKPOINT, DDP_SINK, AccumulateGrad, Node, will_execute

_FEW_LEAVES = 16
"""So many leaves are closed in less time than one more message takes."""


class Reached(NamedTuple):
    """The nodes behind some others that a run must know before it begins."""

    recvs: list[Node]
    accumulators: list[Node]
    """of leaves; those of the Recvs' anchors are not among them"""
    checkpoints: list[Node]
    """those of reentrant activation checkpoints, whose backward runs another backward"""
    sinks: list[Node]
    """DDP's sink nodes (`find_unused_parameters=True`)"""


def reached_from(nodes: Iterable[Node]) -> Reached:
    """What a run from these reaches on this worker, through links too."""
    by_kind: dict[type[Node], list[Node]] = {}
    for node in reachable_from(nodes):
        kind = type(node)
        if kind in _KINDS:
            by_kind.setdefault(kind, []).append(node)
    recvs = by_kind.get(RECV, [])
    accumulators = by_kind.get(AccumulateGrad, [])
    if recvs:
        anchors = {recv.next_functions[end_of(recv).count][0] for recv in recvs}
        accumulators = [node for node in accumulators if node not in anchors]
    return Reached(recvs, accumulators, by_kind.get(CHECKPOINT, []), by_kind.get(DDP_SINK, []))


_KINDS = frozenset([RECV, AccumulateGrad, CHECKPOINT, DDP_SINK])


def may_be_counted(reached: Reached) -> bool:
    """Whether the last gradients of a run may be held until it is over, and announce its end.

    Only if it is over soon after them: not if many leaves are to be closed, or if DDP runs
    callbacks at the end.
    """
    if reached.checkpoints or reached.sinks or len(reached.accumulators) > _FEW_LEAVES:
        return False
    return not reached.accumulators or not (dist.is_available() and dist.is_initialized())


def sends_in(edges: Edges, mine: Lineage, name: Callable[[WorkerId], str]) -> list[Sent]:
    """These Sends of this worker; PeerLost if one was released. `name` is the directory's."""
    found = []
    for n in numbers(mine):
        sent = edges.sent.get(n)
        if sent is None:
            peer = edges.lost_to.get(n)
            lost = "the worker it leads to" if peer is None else name(peer)
            raise PeerLost(
                f"{EdgeId(edges.me, n)} was dropped here: {lost} was lost"
                + (", or the context that it was made in is closed" if peer is None else ""),
                hint="compute what depends on it again",
            ).about("" if peer is None else lost, phase="backward")
        found.append(sent)
    return found


def check_order(edges: Edges, end: EdgeEnd, edges_sent: set[EdgeId]) -> None:
    """A Send is about to wait: UsageError if a Recv of its run should have run before it.

    In a run whose nodes are in order there is none; only other runs are looked at.
    """
    if this_thread.is_ordered:
        return
    sent = edges.sent.get(end.edge.n)
    if sent is None:
        return
    for recv in edges.recvs():
        other = end_of(recv)
        if other.edge in edges_sent or other.origin.depth < sent.depth:
            continue
        if will_execute(recv) and leads_on(recv):
            raise UsageError(
                f"{end.edge} waits for gradients before {other.edge} has sent its own: "
                "the backward was not begun by Python code, or one inside it has failed",
                hint="begin it with loss.backward(), torch.autograd.grad(…) or "
                "gradwire.backward(context_id, [loss])",
            )


def leads_on(recv: Node) -> bool:
    """Whether the current run executes something behind this Recv.

    `will_execute` says yes also to a node at which grad() only captures a gradient; a node that is
    executed has a next one that is.
    """
    for node, _ in recv.next_functions:  # noqa: SIM110  (half the time of a generator)
        if node is not None and will_execute(node):
            return True
    return False
