"""What the current engine run reaches of a context, asked by its first crossing.

See Note [Links], graph/nodes.py: torch's engine knows which nodes it will execute.
"""

from __future__ import annotations

from gradwire.autograd.graph.context import Context, Received
from gradwire.autograd.graph.ordering import leads_on
from gradwire.autograd.messages import TO_GRAD, TO_MAP
from gradwire.autograd.undo.undo_log import ledger_of_run
from gradwire.errors import UsageError
from gradwire.ids import EdgeId
from gradwire.torch_private import AccumulateGrad, Node, will_execute


def stops_of(context: Context, met: EdgeId) -> frozenset[EdgeId]:
    """The Recvs at which the current run ends, which has inputs.

    `backward(inputs=[received])` executes the Recv as the node of a tensor that keeps its gradient,
    and nothing behind it: nobody waits for that gradient elsewhere.
    """
    executed = [r for r in tuple(context.received) if r.edge == met or will_execute(r.node)]
    return frozenset([r.edge for r in executed if not leads_on(r)])


def accumulator(received: Received) -> Node:
    """The node of the Recv's anchor, which backward() executes and grad() does not."""
    for node, _ in received.node.next_functions:
        if isinstance(node, AccumulateGrad) and node.variable is received.anchor:  # type: ignore[attr-defined]
            return node
    raise AssertionError(f"{received.edge} has lost its anchor")


def plain_destination(context: Context) -> int:
    """Where the leaves of a plain backward keep their gradients.

    In the map, if a Function runs it inside a `backward(context, …)`. That is one context's.
    """
    undo_log = ledger_of_run()
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
