"""What a worker runs in a pass that began elsewhere: from which of its Sends, and towards what."""

from __future__ import annotations

import torch.distributed as dist

from gradwire.autograd.backward.active_pass import ActivePass
from gradwire.autograd.graph.context import Received, Sent
from gradwire.autograd.graph.lineage import bits_from_wire, meets, numbers
from gradwire.autograd.graph.walk import Landmarks
from gradwire.autograd.messages import NOWHERE, Start
from gradwire.errors import BadMessage

_FEW_LEAVES = 16
"""Their books are closed in less time than one more message takes."""


def sends_of(
    running: ActivePass, start: Start
) -> tuple[list[Sent], list[Received] | None, Landmarks]:
    """The Sends to run from, the Recvs to run to if they are counted, and the leaves."""
    context, root = running.context, start.pass_id.worker
    edges = bits_from_wire(start.edges)
    needed = None if start.needed is None else bits_from_wire(start.needed)
    mine, received = [], None
    if edges >> len(context.sent):
        raise BadMessage(f"{start.pass_id} names edges of {context} that never left here")
    for n in numbers(edges):
        sent = context.sent[n]
        if sent is not None and (needed is None or meets(sent.lineage, root, needed)):
            mine.append(sent)
            running.mine |= 1 << n
    landmarks = context.walk.landmarks()
    if start.destination == NOWHERE or _may_be_counted(landmarks):
        received = [
            crossed
            for crossed in tuple(context.received)
            if needed is None or meets(crossed.lineage, root, needed)
        ]
    return mine, received, landmarks


def _may_be_counted(landmarks: Landmarks) -> bool:
    """Whether gradients that are the last thing of a run may wait until it is over, and say so.

    Only if it is over soon then: not while the books of many leaves are closed, or while callbacks
    run that DDP has left to the end.
    """
    accumulators, checkpoints, sinks = landmarks
    if checkpoints or sinks or len(accumulators) > _FEW_LEAVES:
        return False
    return not accumulators or not (dist.is_available() and dist.is_initialized())
