"""What an engine run of a pass reaches on this worker.

The coordinator asks from inside its run, at the first crossing: torch's engine knows which nodes it
will execute, see Note [Links], graph/crossing.py. A participant asks before its run begins.
"""

from __future__ import annotations

import torch.distributed as dist

from gradwire.autograd.backward.active_pass import ActivePass
from gradwire.autograd.backward.engine_run import this_thread
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.crossing import Received, Sent, depth_of_recv
from gradwire.autograd.graph.walk import Landmarks, bits_from_wire, meets, numbers
from gradwire.autograd.messages import NOWHERE, TO_GRAD, TO_MAP, Start
from gradwire.autograd.undo.undo_log import undo_log_of_run
from gradwire.errors import BadMessage, UsageError
from gradwire.ids import EdgeId
from gradwire.torch_private import AccumulateGrad, Node, will_execute

_FEW_LEAVES = 16
"""So many leaves are closed in less time than one more message takes."""

# -- asked by the coordinator


def accumulator(received: Received) -> Node:
    """The node of the Recv's anchor, which backward() executes and grad() does not."""
    for node, _ in received.node.next_functions:
        if isinstance(node, AccumulateGrad) and node.variable is received.anchor:  # type: ignore[attr-defined]
            return node
    raise AssertionError(f"{received.edge} has lost its anchor")


def plain_destination(context: Context) -> int:
    """Where leaves keep the gradients of a plain backward: `.grad`.

    Inside a `backward(context, …)`, where a Function runs it: the map of that context.
    """
    undo_log = undo_log_of_run()
    if undo_log is None or undo_log.into is None:
        return TO_GRAD
    if undo_log.into is not context.gradients:
        raise UsageError(
            f"a Function ran a backward in {context} inside a backward of another context",
            hint="a graph may not mix two contexts: detach what is kept from one to the next",
        )
    return TO_MAP


def sends_executed(context: Context) -> int:
    """The Sends of this worker that the current run executes, as a bitset."""
    executed = 0
    for sent in tuple(context.sent):
        if sent is not None and will_execute(sent.node):
            executed |= 1 << sent.edge.n
    return executed


# -- asked by a participant


def sends_of(
    active: ActivePass, start: Start
) -> tuple[list[Sent], list[Received] | None, Landmarks]:
    """The Sends to run from, the Recvs to run to if they are counted, and the landmarks."""
    context, coordinator = active.context, start.pass_id.worker
    edges = bits_from_wire(start.edges)
    needed = None if start.needed is None else bits_from_wire(start.needed)
    mine, received = [], None
    if edges >> len(context.sent):
        raise BadMessage(f"{start.pass_id} names edges of {context} that never left here")
    for n in numbers(edges):
        sent = context.sent[n]
        if sent is not None and (needed is None or meets(sent.lineage, coordinator, needed)):
            mine.append(sent)
            active.mine |= 1 << n
    landmarks = context.walk.landmarks()
    if start.destination == NOWHERE or _may_be_counted(landmarks):
        received = [
            crossed
            for crossed in tuple(context.received)
            if needed is None or meets(crossed.lineage, coordinator, needed)
        ]
    return mine, received, landmarks


def _may_be_counted(landmarks: Landmarks) -> bool:
    """Whether the last gradients of a run may be held until it is over, and announce its end.

    Only if it is over soon after them: not if many leaves are to be closed, or if DDP runs
    callbacks at the end.
    """
    accumulators, checkpoints, sinks = landmarks
    if checkpoints or sinks or len(accumulators) > _FEW_LEAVES:
        return False
    return not accumulators or not (dist.is_available() and dist.is_initialized())


def check_order(context: Context, edge: EdgeId, edges_sent: set[EdgeId]) -> None:
    """A Send is about to wait: UsageError if a Recv of its run should have run before it.

    In a run whose nodes are in order there is none; only other runs are looked at.
    """
    if this_thread.is_ordered:
        return
    sent = context.sent[edge.n]
    if sent is None:
        return
    for received in tuple(context.received):
        if received.edge in edges_sent or depth_of_recv(received.node) < sent.depth:
            continue
        if will_execute(received.node) and leads_on(received):
            raise UsageError(
                f"{edge} of {context} waits for gradients before {received.edge} has sent its own: "
                "the backward was not begun by Python code, or one inside it has failed",
                hint="begin it with loss.backward(), torch.autograd.grad(…) or "
                "gradwire.backward(context_id, [loss])",
            )


def leads_on(received: Received) -> bool:
    """Whether the current run executes something behind this Recv.

    `will_execute` says yes also to a node at which grad() only captures a gradient; a node that is
    executed has a next one that is.
    """
    for node, _ in received.node.next_functions:  # noqa: SIM110  (half the time of a generator)
        if node is not None and will_execute(node):
            return True
    return False
