"""The two points where a graph crosses, as nodes of torch's own graph.

    Send   takes the tensors that leave and returns a token. Its backward waits until the edge is
           settled and returns the gradients.
    Recv   takes the received tensors and returns them alive. Its backward ships the gradients at
           once, one way.
    Join   takes tokens and returns a token: a shared link to several Sends.

The nodes of Send and Recv have the names of their ancestors in torch, for programs that look for
them in a graph or in a profile.

Note [Links]: a Recv also hangs on the Sends of its own worker that are in its lineage. So each
worker's local graph is the projection of the global one, and torch's engine does the right thing by
itself: it runs what the loss reaches, a Send after every Recv that depends on it, and nothing else.

Note [Nodes hold no context]: a node holds its ids and a weak way home. A node that held its context
would close a cycle through C++ (context, token, node) that Python's collector cannot see.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import msgspec
import torch
from torch.autograd import Function

from gradwire.autograd.graph.walk import FROM_HERE, Origin
from gradwire.errors import ContextClosed
from gradwire.ids import ContextId, EdgeId, WorkerId, spoken_context
from gradwire.torch_private import Node, backward_class, call_directly, name_nodes

Gradients = list[torch.Tensor | None]

with torch.inference_mode(False):
    _NOTHING = torch.zeros((), device="cpu")  # what every token shows: nobody looks at its value


class Home(Protocol):
    """What a node asks of the worker it belongs to."""

    def collect(self, context: ContextId, edge: EdgeId, peer: WorkerId) -> Gradients:
        """Wait until the edge is settled; its gradients."""

    def ship(self, context: ContextId, edge: EdgeId, peer: WorkerId, gradients: Gradients) -> None:
        """Settle the edge on the worker its tensors came from."""


EngineRef = weakref.ref[Home]


class EdgeEnd(msgspec.Struct, frozen=True):
    """Where a node stands: its worker's end of one edge. See Note [Nodes hold no context]."""

    way_home: EngineRef
    context: ContextId
    edge: EdgeId
    peer: WorkerId
    origin: Origin = FROM_HERE
    count: int = 0
    """of a Recv: how many tensors it has received"""

    def home(self) -> Home:
        """The worker, as long as it runs."""
        home = self.way_home()
        if home is None:
            raise ContextClosed(
                f"{self.edge} of {spoken_context(self.context)} leads to a worker that is closed",
                hint="run backward before shutdown()",
            )
        return home


def origin_of_recv(context: ContextId, node: Node) -> Origin:
    """Where a Recv's tensors came from.

    One of another context is a boundary like a leaf: if a backward reaches it, it says so itself.
    """
    side: EdgeEnd = node.side  # type: ignore[attr-defined]  # set in Recv.forward
    return side.origin if side.context == context else FROM_HERE


def depth_of_recv(node: Node) -> int:
    """How deep the edge is by which a Recv's tensors came, whichever context it belongs to."""
    side: EdgeEnd = node.side  # type: ignore[attr-defined]  # set in Recv.forward
    return side.origin.depth


class Send(Function):
    """See the top of this file. See Note [The order of waiting], walk.py, for its number."""

    @staticmethod
    def forward(node: Any, side: EdgeEnd, *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """A token; the tensors are only hung onto."""
        node.side = side
        node.set_materialize_grads(False)
        return _NOTHING.detach()

    @staticmethod
    def backward(node: Any, *_: Any) -> Any:  # noqa: ANN401
        """Wait for the gradients."""
        side: EdgeEnd = node.side
        return None, *side.home().collect(side.context, side.edge, side.peer)


class Recv(Function):
    """See the top of this file."""

    @staticmethod
    def forward(node: Any, side: EdgeEnd, *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        """The received tensors, alive. `inputs` are these, then the anchor, then links."""
        node.side, node.nothing = side, (None,) * (1 + len(inputs))
        node.set_materialize_grads(False)
        tensors = inputs[: side.count]
        node.mark_dirty(*tensors)  # the callee may modify in place what it received
        return tensors

    @staticmethod
    def backward(node: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: ANN401
        """Ship them. A link carries no gradient, only the order."""
        side: EdgeEnd = node.side
        side.home().ship(side.context, side.edge, side.peer, list(gradients))
        return node.nothing


def anchor() -> torch.Tensor:
    """An input of a Recv's own."""
    return _NOTHING.detach().requires_grad_()


RECV = backward_class(Recv)
call_directly(Send)
call_directly(Recv)
name_nodes(Send, "torch::distributed::autograd::SendRpcBackward")
name_nodes(Recv, "torch::distributed::autograd::RecvRpcBackward")


class Joined(Function):
    """See the top of this file."""

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
