"""What a peer says of a crossing, before anything is made of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from gradwire.autograd.graph.context import Context
from gradwire.autograd.messages import Crossing
from gradwire.errors import BadMessage
from gradwire.ids import LAST_WORKER, EdgeId, PassId, WorkerId

_HINT = "begin a new context now and then, or raise Limits(edges=…)"
_PEERS = 8
"""Edges are numbered over all peers of a worker and counted by peer: so much higher are numbers."""


def check_crossing(
    crossed: Crossing, peer: WorkerId, tensors: Sequence[torch.Tensor], most_edges: int
) -> None:
    """BadMessage for what no correct peer says.

    The depth most of all: a thread makes nodes until it has come as far (`lift_this_thread`).

    hot: every edge that arrives
    """
    edge, places, count, most = crossed.edge, crossed.tensors, len(tensors), _PEERS * most_edges
    if edge.worker != peer or not 0 <= edge.n < most:
        raise BadMessage(f"{edge} is no edge of w{peer}, or over the limit of {most}", hint=_HINT)
    if not 0 < crossed.depth <= most:
        raise BadMessage(f"{edge} is {crossed.depth} deep, the limit is {most}", hint=_HINT)
    for worker, edges in crossed.lineage.items():
        if not 0 <= worker <= LAST_WORKER or 8 * len(edges) > most + 8:
            raise BadMessage(f"{edge} depends on edges that w{worker} cannot have")
    if not places or (len(places) > 1 and len(set(places)) < len(places)):
        raise BadMessage(f"{edge} has no tensors, or one of them twice")
    for place in places:
        if not 0 <= place < count:
            raise BadMessage(f"{edge} names a tensor that its message does not have")
        tensor = tensors[place]
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.requires_grad:
            raise BadMessage(f"{edge} names a tensor that has no gradient, or another edge already")


def check_gradients(context: Context, edge: EdgeId, source: WorkerId) -> bool:
    """Whether an edge that a peer settles is there still; BadMessage if it leads to another."""
    if not 0 <= edge.n < len(context.sent):
        raise BadMessage(f"w{source} settles {edge}, which never left here")
    sent = context.sent[edge.n]
    if sent is not None and (sent.edge, sent.peer) != (edge, source):
        raise BadMessage(f"w{source} settles {edge}, which leads to another worker")
    return sent is not None


def check_asked(pass_id: PassId, asked: Collection[WorkerId], source: WorkerId) -> None:
    """BadMessage if a pass is failed by one that its root, which we are, has not told to run."""
    if source not in asked:
        raise BadMessage(f"w{source} fails {pass_id}, in which it was not asked to run")


def check_root(pass_id: PassId, source: WorkerId) -> None:
    """BadMessage if a pass is begun or ended by another worker than its root."""
    if pass_id.worker != source:
        raise BadMessage(f"w{source} speaks for {pass_id}, which is another worker's")
