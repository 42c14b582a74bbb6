"""Where a graph crosses: the nodes that stand there, and how edges are recorded.

    Send   takes the tensors that leave and returns a token. Its backward waits until the edge is
           settled and returns the gradients.
    Recv   takes the received tensors and returns them with a graph. Its backward sends the
           gradients at once, one way.
    Join   takes tokens and returns a token: a shared link to several Sends.

The nodes of Send and Recv have the names that torch gives to its own, for programs that look for
them in a graph or in a profile.

Note [Links]: the inputs of a Recv include the tokens of the Sends of its own worker that are in its
lineage. So each worker's local graph is the projection of the global one, and torch's engine does
the right thing by itself: it runs what the loss reaches, a Send after every Recv that depends on
it, and nothing else.

Note [The stream of a Send]: torch runs a backward on the stream on which the forward ran, and lets
it wait for the streams of the gradients that it uses. It takes the stream of a node from the node's
outputs, and that of a Send is a token on the CPU. So a Send remembers on which stream each tensor
left, and brings its gradient there. The tensor leaves through a view, whose node has that stream:
from there on torch does the rest, if the tensor was made on another stream.

Note [Nodes hold no table]: a node holds ids and a weak reference to the engine. A node that held
the table of edges would close a cycle through C++ (table, token, node) that Python's collector
cannot see.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.autograd import Function

from gradwire.agent.devices.own import Home
from gradwire.autograd.graph.edges import Edges, Join, Sent
from gradwire.autograd.graph.lineage import (
    Lineage,
    from_wire,
    latest,
    minus,
    of_worker,
    one,
    plus,
    to_wire,
    union,
)
from gradwire.autograd.graph.walk import (
    FROM_HERE,
    Origin,
    lift_this_thread,
    node_of,
    origin_behind,
    set_origin,
)
from gradwire.autograd.messages import Crossing
from gradwire.current import UserLine
from gradwire.errors import BadMessage, ContextClosed
from gradwire.ids import ContextId, EdgeId, WorkerId
from gradwire.torch_private import (
    Node,
    applying,
    is_recording,
    lift,
    named_nodes,
    recording,
    set_sequence_number,
    with_accumulator,
)

if TYPE_CHECKING:
    from gradwire.autograd.engine import Engine

with torch.inference_mode(False):
    _NOTHING = torch.zeros((), device="cpu")  # the value of every token, which nothing reads
_JOINS_KEPT = 32
"""How many of the latest Joins a new link may build on: one per recurrent state in use."""


class EdgeEnd(msgspec.Struct, frozen=True):
    """One worker's end of an edge, held by its node. See Note [Nodes hold no table]."""

    engine_ref: weakref.ref[Engine]
    context: ContextId | None
    edge: EdgeId
    peer: WorkerId
    origin: Origin = FROM_HERE
    count: int = 0
    """of a Recv: how many tensors it has received"""
    homes: tuple[Home, ...] | None = None
    """of a Send: where its tensors were, unless all were on the CPU"""

    def engine(self) -> Engine:
        """The engine; ContextClosed if its worker has shut down."""
        engine = self.engine_ref()
        if engine is None:
            raise ContextClosed(
                f"{self.edge} leads to a worker that is closed",
                hint="run backward before shutdown()",
            )
        return engine


end_of: Callable[[Node], EdgeEnd] = attrgetter("end")
"""The end of a Recv or a Send, which `forward` has set."""


def anchor_of(recv: Node) -> Node:
    """The node of a Recv's anchor, which backward() executes and grad() does not."""
    node = recv.next_functions[end_of(recv).count][0]
    assert node is not None, "a Recv has lost its anchor"
    return node


class Send(Function):
    """The node where tensors leave. See Note [The order of waiting], walk.py, for its number."""

    @staticmethod
    def forward(node: Any, end: EdgeEnd, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """A token; the tensors are inputs only for the graph."""
        node.end, node.materialize_grads = end, False
        return _NOTHING.detach()

    @staticmethod
    def backward(node: Any, *_: Any) -> Any:  # noqa: ANN401
        """Wait for the gradients."""
        return None, *node.end.engine().wait_for_gradients(node.end)


class Recv(Function):
    """The node where tensors arrive."""

    @staticmethod
    def forward(node: Any, end: EdgeEnd, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        """The received tensors. `inputs` are these, then the anchor, then links."""
        node.end, node.nothing = end, (None,) * (1 + len(inputs))
        node.materialize_grads = False
        # Marked as dirty: the callee may modify in place what it received.
        tensors = node.dirty_tensors = inputs[: end.count]
        return tensors

    @staticmethod
    def backward(node: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: ANN401
        """Send them. A link carries no gradient, only the order."""
        node.end.engine().send_gradients(node, node.end, gradients)
        return node.nothing


SEND = named_nodes(Send, "torch::distributed::autograd::SendRpcBackward")
RECV = named_nodes(Recv, "torch::distributed::autograd::RecvRpcBackward")


class Joined(Function):
    """The node of a Join."""

    @staticmethod
    def forward(node: Any, *tokens: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """One token for all."""
        node.materialize_grads, node.count = False, len(tokens)
        return _NOTHING.detach()

    @staticmethod
    def backward(node: Any, *_: Any) -> Any:  # noqa: ANN401
        """Only the order passes."""
        return (None,) * node.count


# -- edges


HomesOf = Callable[[Sequence[torch.Tensor]], tuple[Home, ...]]
_send, _recv, _join = applying(Send), applying(Recv), applying(Joined)


def leave(
    edges: Edges,
    engine: weakref.ref[Engine],
    context: ContextId | None,
    peer: WorkerId,
    places: list[int],
    tensors: Sequence[torch.Tensor],
    made_at: float,
    line: UserLine | None,
    homes_of: HomesOf | None = None,
) -> Crossing:
    """Record that the tensors at these places of a message leave together by one new edge."""
    if not is_recording():
        with recording():
            return leave(edges, engine, context, peer, places, tensors, made_at, line, homes_of)
    leaving, held, size, homes = [], [], 0, None
    for place in places:
        tensor = tensors[place]
        size += tensor.numel() * tensor.itemsize
        if tensor.is_leaf:
            held.append(with_accumulator(tensor))
        if not tensor.is_cpu:  # See Note [The stream of a Send]
            assert homes_of is not None
            homes = homes or homes_of([tensors[place] for place in places])
            if tensor.layout is torch.strided:  # others have no views
                tensor = tensor.view_as(tensor)
        leaving.append(tensor)
    edge = edges.next_edge()
    token = _send(EdgeEnd(engine, context, edge, peer, homes=homes), *leaving)
    del held
    node = token.grad_fn
    origin = origin_behind(node)
    lineage, depth = plus(origin.lineage, edge), edges.next_depth(origin.depth)
    set_sequence_number(node, depth)
    crossing = Crossing(edge, depth, to_wire(lineage), places)
    # Last, and with no call after the store: a signal handler may raise after each call.
    edges.sent[edge.n] = Sent(edge, peer, lineage, depth, token, node, size, made_at, line)
    return crossing


def arrive(
    edges: Edges,
    engine: weakref.ref[Engine],
    context: ContextId | None,
    peer: WorkerId,
    crossing: Crossing,
    tensors: list[torch.Tensor],
) -> Node:
    """Replace each received tensor by the output of a Recv node: backward reaches the sender."""
    if not is_recording():
        with recording():
            return arrive(edges, engine, context, peer, crossing, tensors)
    places, depth, lineage = crossing.tensors, crossing.depth, from_wire(crossing.lineage)
    origin = Origin(lineage, depth)
    end = EdgeEnd(engine, context, crossing.edge, peer, origin, len(places))
    # A Function makes a node only if an input requires a gradient. Received tensors do not, so the
    # Recv gets one more input that does. A backward() executes its accumulator and a grad() does
    # not, which tells the two apart (backward/coordinator.py).
    anchor = _NOTHING.detach().requires_grad_()
    mine = of_worker(lineage, edges.me)
    links = _links(edges, mine) if mine else ()
    outputs = _recv(end, *map(tensors.__getitem__, places), anchor, *links)
    node: Node = outputs[0].grad_fn
    was_below = lift(node, depth)
    set_origin(node, origin)
    edges.arrived(end, node)
    for place, tensor in zip(places, outputs, strict=True):
        tensors[place] = tensor
    if was_below:
        lift_this_thread(depth)
    return node


def _links(edges: Edges, mine: Lineage) -> list[torch.Tensor]:
    """Tokens that lead to exactly these Sends of this worker: none or one."""
    top = latest(mine)
    first = edges.sent.get(top)
    if first is not None:
        behind = first.lineage
        if mine.items() <= behind.items() or not minus(mine, behind):  # most often equal
            return [first.token]  # it depends on the rest
    if not edges.has_sent(top):
        raise BadMessage(f"a lineage names edges of worker {edges.me} that never left it")
    join = next((join for join in reversed(edges.joins) if not minus(join.edges, mine)), None)
    tops = _maximal(edges, minus(mine, join.edges) if join else mine)
    tokens = [top.token for top in tops]
    depth = max((top.depth for top in tops), default=0)
    if join is not None and minus(join.edges, union([top.lineage for top in tops])):
        tokens.append(join.token)
        depth = max(depth, join.depth)
    if len(tokens) < 2:
        return tokens
    joined = Join(mine, depth, _join(*tokens))
    lift(node_of(joined.token), depth)
    edges.joins = [*edges.joins[1 - _JOINS_KEPT :], joined]
    return [joined.token]


def _maximal(edges: Edges, left: Lineage) -> list[Sent]:
    """The edges on which no other of them depends. The latest is always one of them."""
    found = []
    while left:
        edge = EdgeId(edges.me, latest(left))
        top = edges.sent.get(edge.n)
        if top is not None:  # else it was released early: a pass through it says so
            found.append(top)
        left = minus(left, one(edge) if top is None else top.lineage)
    return found


# -- what a peer says of an edge, before anything is made of it

_HINT = "detach what need not be differentiated so far back, or raise Limits(edges=…)"
_EDGE_BITS = 48
_PEERS = 8
"""Depths grow over all peers of a worker, and edges are limited by peer."""


def check_crossing(
    crossed: Crossing, peer: WorkerId, tensors: Sequence[torch.Tensor], most_edges: int
) -> None:
    """BadMessage for what no correct peer says. hot: every edge that arrives

    The depth most of all: a thread makes nodes until it has come as far (`lift_this_thread`).
    """
    edge, places, count, most = crossed.edge, crossed.tensors, len(tensors), _PEERS * most_edges
    if edge.worker != peer or edge.n >> _EDGE_BITS:  # or negative
        raise BadMessage(f"{edge} is no edge of w{peer}")
    if not 0 < crossed.depth <= most:
        raise BadMessage(f"{edge} is {crossed.depth} deep, the limit is {most}", hint=_HINT)
    if len(crossed.lineage) > most:
        raise BadMessage(f"{edge} depends on more edges than there may be", hint=_HINT)
    if not places or (len(places) > 1 and len(set(places)) < len(places)):
        raise BadMessage(f"{edge} has no tensors, or one of them twice")
    for place in places:
        if not 0 <= place < count:
            raise BadMessage(f"{edge} names a tensor that its message does not have")
        tensor = tensors[place]
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.requires_grad:
            raise BadMessage(f"{edge} names a tensor that has no gradient, or another edge already")


def check_gradients(edges: Edges, edge: EdgeId, source: WorkerId) -> bool:
    """Whether an edge that a peer settles is there still; BadMessage if it leads to another."""
    sent = edges.sent.get(edge.n) if edge.worker == edges.me else None
    if sent is None:
        if edge.worker != edges.me or not edges.has_sent(edge.n):
            raise BadMessage(f"w{source} settles {edge}, which never left here")
        return False
    if sent.peer != source:
        raise BadMessage(f"w{source} settles {edge}, which leads to another worker")
    return True
