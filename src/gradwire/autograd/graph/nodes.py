"""The two points where a graph crosses, as nodes of torch's own graph.

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
    _NOTHING = torch.zeros((), device="cpu")  # the value of every token, which nothing reads


class GradientEngine(Protocol):
    """What a node asks of the engine of its worker."""

    def wait_for_gradients(self, context: ContextId, edge: EdgeId, peer: WorkerId) -> Gradients:
        """Wait until the edge is settled, and take its gradients."""

    def send_gradients(
        self, context: ContextId, edge: EdgeId, peer: WorkerId, gradients: Gradients
    ) -> None:
        """Settle the edge on the worker its tensors came from."""


EngineRef = weakref.ref[GradientEngine]


class EdgeEnd(msgspec.Struct, frozen=True):
    """One worker's end of an edge, held by its node. See Note [Nodes hold no context]."""

    engine_ref: EngineRef
    context: ContextId
    edge: EdgeId
    peer: WorkerId
    origin: Origin = FROM_HERE
    count: int = 0
    """of a Recv: how many tensors it has received"""

    def engine(self) -> GradientEngine:
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


def anchor() -> torch.Tensor:
    """A leaf that is an input of one Recv only; see `crossing.arrive`."""
    return _NOTHING.detach().requires_grad_()


RECV = backward_class(Recv)
call_directly(Send)
call_directly(Recv)
name_nodes(Send, "torch::distributed::autograd::SendRpcBackward")
name_nodes(Recv, "torch::distributed::autograd::RecvRpcBackward")


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
