"""What leaves and what arrives: the two moments at which a crossing is recorded.

See Note [Links], nodes.py.
"""

from __future__ import annotations

import torch

from gradwire.autograd.context import Context, Join, Received, Sent
from gradwire.autograd.graph import Origin, lift, lift_this_thread
from gradwire.autograd.lineage import from_wire, plus, to_wire
from gradwire.autograd.messages import Crossing
from gradwire.autograd.nodes import Home, Joined, Recv, Send, Side
from gradwire.autograd.torch_private import (
    Node,
    applying,
    recording,
    sequence_number,
    set_sequence_number,
    with_accumulator,
)
from gradwire.errors import BadMessage
from gradwire.ids import EdgeId, WorkerId

_send, _recv, _join = applying(Send), applying(Recv), applying(Joined)

_JOINS_SEARCHED = 32
"""How many of the latest Joins a new link may build on: one per recurrent state in use."""


def leave(
    context: Context, home: Home, me: WorkerId, peer: WorkerId, tensors: dict[int, torch.Tensor]
) -> Crossing:
    """Record that these tensors, by their places in a message, leave together by one new edge."""
    with context.lock, recording():
        edge = EdgeId(me, len(context.sent))
        held = [with_accumulator(tensor) for tensor in tensors.values() if tensor.is_leaf]
        token = _send(Side(home, context.id, edge, peer), *tensors.values())
        del held
        node = token.grad_fn
        origin = context.walk.origin([parent for parent, _ in node.next_functions])
        lineage, depth = plus(origin.lineage, edge), context.next_depth(origin.depth)
        set_sequence_number(node, depth)
        context.sent.append(Sent(edge, peer, lineage, depth, token))
    return Crossing(edge, depth, to_wire(lineage), list(tensors))


def arrive(
    context: Context,
    home: Home,
    me: WorkerId,
    peer: WorkerId,
    crossing: Crossing,
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The tensors of one edge, alive: what is made of them leads back over it."""
    origin = Origin(from_wire(crossing.lineage), crossing.depth)
    side = Side(home, context.id, crossing.edge, peer, origin)
    # A Function makes a node only for inputs that want a gradient, and received tensors do not: an
    # input of its own that does wakes it up. It also tells backward() from grad(), see engine.py.
    with context.lock, recording():
        anchor = torch.zeros((), requires_grad=True)
        links = _links(context, me, origin.lineage.get(me, 0))
        alive = _recv(side, len(tensors), *tensors, anchor, *links)
        received = [alive] if len(tensors) == 1 else list(alive)
        node = _node_of(received[0])
        number = sequence_number(node)
        lift(node, origin.depth)
        context.walk.note(node, origin)
        context.received.append(Received(crossing.edge, origin.lineage, node, anchor))
    if number < origin.depth:
        lift_this_thread(origin.depth)
    return received


def _links(context: Context, me: WorkerId, mine: int) -> list[torch.Tensor]:
    """A token that stands for exactly these of this worker's sends; nothing for none."""
    if not mine:
        return []
    if mine >> len(context.sent):
        raise BadMessage(f"a lineage names edges of worker {me} that never left it")
    latest = _sent(context, mine.bit_length() - 1)
    if mine & ~latest.lineage[me] == 0:
        return [latest.token]  # it implies the rest
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
    """Those that no other of them implies. The latest never is implied by an earlier one."""
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
