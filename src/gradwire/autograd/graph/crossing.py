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

Note [Nodes hold no context]: a node holds ids and a weak reference to the engine. A node that held
its context would close a cycle through C++ (context, token, node) that Python's collector cannot
see.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.autograd import Function

from gradwire.autograd.graph.walk import (
    FROM_HERE,
    Lineage,
    Origin,
    from_wire,
    lift_this_thread,
    node_of,
    plus,
    to_wire,
)
from gradwire.autograd.messages import Crossing
from gradwire.errors import BadMessage, ContextClosed
from gradwire.ids import LAST_WORKER, ContextId, EdgeId, WorkerId, spoken_context
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
    from gradwire.autograd.graph.context import Context

with torch.inference_mode(False):
    _NOTHING = torch.zeros((), device="cpu")  # the value of every token, which nothing reads


class EdgeEnd(msgspec.Struct, frozen=True):
    """One worker's end of an edge, held by its node. See Note [Nodes hold no context]."""

    engine_ref: weakref.ref[Engine]
    context: ContextId
    edge: EdgeId
    peer: WorkerId
    origin: Origin = FROM_HERE
    count: int = 0
    """of a Recv: how many tensors it has received"""

    def engine(self) -> Engine:
        """The engine; ContextClosed if its worker has shut down."""
        engine = self.engine_ref()
        if engine is None:
            raise ContextClosed(
                f"{self.edge} of {spoken_context(self.context)} leads to a worker that is closed",
                hint="run backward before shutdown()",
            )
        return engine


def origin_of_recv(context: ContextId, node: Node) -> Origin:
    """What a Recv's tensors depend on.

    A Recv of another context counts as a leaf: a backward that reaches it raises there.
    """
    end: EdgeEnd = node.end  # type: ignore[attr-defined]  # set in Recv.forward
    return end.origin if end.context == context else FROM_HERE


def depth_of_recv(node: Node) -> int:
    """The depth of a Recv's edge, in whichever context."""
    end: EdgeEnd = node.end  # type: ignore[attr-defined]  # set in Recv.forward
    return end.origin.depth


class Send(Function):
    """The node where tensors leave. See Note [The order of waiting], walk.py, for its number."""

    @staticmethod
    def forward(node: Any, end: EdgeEnd, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """A token; the tensors are inputs only for the graph."""
        node.end = end
        node.set_materialize_grads(False)
        return _NOTHING.detach()

    @staticmethod
    def backward(node: Any, *_: Any) -> Any:  # noqa: ANN401
        """Wait for the gradients."""
        end: EdgeEnd = node.end
        return None, *end.engine().wait_for_gradients(end.context, end.edge, end.peer)


class Recv(Function):
    """The node where tensors arrive."""

    @staticmethod
    def forward(node: Any, end: EdgeEnd, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        """The received tensors. `inputs` are these, then the anchor, then links."""
        node.end, node.nothing = end, (None,) * (1 + len(inputs))
        node.set_materialize_grads(False)
        tensors = inputs[: end.count]
        node.mark_dirty(*tensors)  # the callee may modify in place what it received
        return tensors

    @staticmethod
    def backward(node: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: ANN401
        """Send them. A link carries no gradient, only the order."""
        end: EdgeEnd = node.end
        end.engine().send_gradients(end.context, end.edge, end.peer, list(gradients))
        return node.nothing


named_nodes(Send, "torch::distributed::autograd::SendRpcBackward")
RECV = named_nodes(Recv, "torch::distributed::autograd::RecvRpcBackward")


class Joined(Function):
    """The node of a Join."""

    @staticmethod
    def forward(node: Any, *tokens: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """One token for all."""
        node.set_materialize_grads(False)
        node.count = len(tokens)
        return _NOTHING.detach()

    @staticmethod
    def backward(node: Any, *_: Any) -> Any:  # noqa: ANN401
        """Only the order passes."""
        return (None,) * node.count


# -- edges


class Sent(msgspec.Struct, frozen=True):
    """A crossing that left here. To run from its `token` is to run its Send."""

    edge: EdgeId
    peer: WorkerId
    lineage: Lineage
    depth: int
    token: torch.Tensor
    node: Node
    """the Send"""


class Received(msgspec.Struct, frozen=True):
    """A crossing that arrived here. Only a plain backward() reaches `anchor`, the Recv's input."""

    edge: EdgeId
    lineage: Lineage
    node: Node
    anchor: torch.Tensor


@dataclass(slots=True)
class Join:
    """One node that stands for a set of sends: a Recv has one link, however many it needs."""

    edges: int
    depth: int
    token: torch.Tensor


_send, _recv, _join = applying(Send), applying(Recv), applying(Joined)

receiving: set[int] = set()
"""the contexts of this process, of all its workers, that have received something and are open: runs
are prepared while there is one (backward/engine_run.py). By identity, so that none is kept alive;
a WeakSet takes four calls more for each context
"""
_JOINS_SEARCHED = 32
"""How many of the latest Joins a new link may build on: one per recurrent state in use."""
_HINT = "begin a new context now and then, or raise Limits(edges=…)"
_PEERS = 8
"""Edges are numbered over all peers of a worker and counted by peer: so much higher are numbers."""


def leave(
    context: Context,
    engine: weakref.ref[Engine],
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
    engine: weakref.ref[Engine],
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
    anchor = _NOTHING.detach().requires_grad_()
    mine = origin.lineage.get(me)
    links = _links(context, me, mine) if mine else ()
    outputs = _recv(end, *taken, anchor, *links)
    node = node_of(outputs[0])
    was_below = lift(node, depth)
    context.walk.known[node] = origin
    if not context.received:
        receiving.add(id(context))
    context.received.append(Received(crossing.edge, origin.lineage, node, anchor))
    for place, tensor in zip(places, outputs, strict=True):
        tensors[place] = tensor
    if was_below:
        lift_this_thread(depth)
    return None


def receives_no_more(context: Context) -> None:
    """A context was closed: a run that meets its Recvs fails, so none needs to be prepared."""
    receiving.discard(id(context))


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
    lift(node_of(joined.token), depth)
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


# -- what a peer says of an edge, before anything is made of it


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
