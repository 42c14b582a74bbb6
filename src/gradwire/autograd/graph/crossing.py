"""Records edges: when tensors leave this worker, and when tensors arrive.

See Note [Links], nodes.py. See Note [A context is not locked], context.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.autograd.graph import ordering
from gradwire.autograd.graph.context import Context, Join, Received, Sent
from gradwire.autograd.graph.lineage import from_wire, plus, to_wire
from gradwire.autograd.graph.nodes import EdgeEnd, EngineRef, Joined, Recv, Send, anchor
from gradwire.autograd.graph.walk import Origin, lift_this_thread
from gradwire.autograd.messages import Crossing
from gradwire.errors import BadMessage
from gradwire.ids import EdgeId, WorkerId
from gradwire.torch_private import (
    Node,
    applying,
    is_recording,
    lift,
    recording,
    set_sequence_number,
    with_accumulator,
)

_send, _recv, _join = applying(Send), applying(Recv), applying(Joined)

_JOINS_SEARCHED = 32
"""How many of the latest Joins a new link may build on: one per recurrent state in use."""


def leave(
    context: Context,
    engine: EngineRef,
    me: WorkerId,
    peer: WorkerId,
    places: list[int],
    tensors: Sequence[torch.Tensor],
) -> Crossing:
    """Record that the tensors at these places of a message leave together by one new edge."""
    if not is_recording():
        with recording():
            return leave(context, engine, me, peer, places, tensors)
    leaving = [tensors[place] for place in places]
    edge = EdgeId(me, context.next_edge())
    held = [with_accumulator(tensor) for tensor in leaving if tensor.is_leaf]
    token = _send(EdgeEnd(engine, context.id, edge, peer), *leaving)
    del held
    node = token.grad_fn
    origin = context.walk.behind(node)
    lineage, depth = plus(origin.lineage, edge), context.next_depth(origin.depth)
    set_sequence_number(node, depth)
    context.sent[edge.n] = Sent(edge, peer, lineage, depth, token, node)
    return Crossing(edge, depth, to_wire(lineage), places)


def arrive(
    context: Context,
    engine: EngineRef,
    me: WorkerId,
    peer: WorkerId,
    crossing: Crossing,
    tensors: list[torch.Tensor],
) -> None:
    """Replace each received tensor by the output of a Recv node: backward reaches the sender."""
    if not is_recording():
        with recording():
            return arrive(context, engine, me, peer, crossing, tensors)
    places, depth = crossing.tensors, crossing.depth
    origin = Origin(from_wire(crossing.lineage), depth)
    end = EdgeEnd(engine, context.id, crossing.edge, peer, origin, len(places))
    taken = [tensors[place] for place in places]
    # A Function makes a node only if an input requires a gradient. Received tensors do not, so the
    # Recv gets one more input that does. A backward() executes its accumulator and a grad() does
    # not, which tells the two apart (backward/reach.py).
    anchored = anchor()
    mine = origin.lineage.get(me)
    links = _links(context, me, mine) if mine else ()
    outputs = _recv(end, *taken, anchored, *links)
    node = _node_of(outputs[0])
    was_below = lift(node, depth)
    context.walk.note(node, origin)
    if not context.received:
        ordering.receives(context)
    context.received.append(Received(crossing.edge, origin.lineage, node, anchored))
    for place, tensor in zip(places, outputs, strict=True):
        tensors[place] = tensor
    if was_below:
        lift_this_thread(depth)
    return None


def _links(context: Context, me: WorkerId, mine: int) -> list[torch.Tensor]:
    """Tokens that lead to exactly these Sends of this worker: none or one."""
    if mine >> len(context.sent):
        raise BadMessage(f"a lineage names edges of worker {me} that never left it")
    latest = _sent(context, mine.bit_length() - 1)
    if mine & ~latest.lineage[me] == 0:
        return [latest.token]  # it depends on the rest
    join = next(
        (join for join in context.joins[: -_JOINS_SEARCHED - 1 : -1] if join.edges & ~mine == 0),
        None,
    )
    tops = _maximal(context, me, mine & ~join.edges if join else mine)
    tokens = [top.token for top in tops]
    depth = max((top.depth for top in tops), default=0)
    implied = 0
    for top in tops:
        implied |= top.lineage[me]
    if join is not None and join.edges & ~implied:
        tokens.append(join.token)
        depth = max(depth, join.depth)
    if len(tokens) == 1:
        return tokens
    joined = Join(mine, depth, _join(*tokens))
    lift(_node_of(joined.token), depth)
    context.joins.append(joined)
    return [joined.token]


def _maximal(context: Context, me: WorkerId, edges: int) -> list[Sent]:
    """The edges on which no other of them depends. The latest is always one of them."""
    found = []
    while edges:
        latest = _sent(context, edges.bit_length() - 1)
        found.append(latest)
        edges &= ~latest.lineage[me]
    return found


def _sent(context: Context, n: int) -> Sent:
    sent = context.sent[n]
    if sent is None:
        raise BadMessage(f"a lineage names edge {n}, which never left")
    return sent


def _node_of(tensor: torch.Tensor) -> Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn
