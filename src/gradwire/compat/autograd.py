"""gradwire's autograd under the names of `torch.distributed.autograd`, private ones included."""
# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from gradwire.autograd import api
from gradwire.autograd.api import context, get_gradients
from gradwire.autograd.api import release_context as _release_context
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.edges import Sent
from gradwire.autograd.scope import current_context
from gradwire.current import current_worker
from gradwire.errors import GradwireError, RemoteError, UsageError
from gradwire.ids import ContextId, WorkerId, context_id
from gradwire.ids import context_id as _as_int
from gradwire.torch_private import span

__all__ = ["context", "is_available"]  # torch's

_MOST_WORKERS = 1 << 16

Node = torch.autograd.graph.Node


@final
class DistAutogradContext:
    """One worker's part of a context: its Send and Recv nodes, by message, in their order."""

    def __init__(self, context: Context) -> None:
        self._context, self._edges = context, api.current_engine().edges

    def _context_id(self) -> ContextId:
        return self._context.id

    def _send_functions(self) -> dict[int, Node]:
        return {_as_int(sent.edge.worker, sent.edge.n): sent.node for sent in self._sent()}

    def _recv_functions(self) -> dict[int, Node]:
        received = self._edges.received
        known = [edge for edge in tuple(self._context.received) if edge in received]
        nodes = [(edge, received[edge].node()) for edge in known]
        return {_as_int(edge.worker, edge.n): node for edge, node in nodes if node is not None}

    def _known_worker_ids(self) -> set[WorkerId]:
        return self._context.called | {sent.peer for sent in self._sent()}

    def _sent(self) -> list[Sent]:
        table = self._edges.sent
        return [table[n] for n in tuple(self._context.sent) if n in table]


def is_available() -> bool:
    """Always."""
    return True


def backward(
    context_id: ContextId, roots: Sequence[torch.Tensor], retain_graph: bool = False
) -> None:
    """Accumulate gradients of scalar roots in the context, on all workers; see `get_gradients`.

    A failure is a RuntimeError that names the worker.
    """
    with span("torch::distributed::autograd::backward"):
        try:
            api.backward(context_id, roots, retain_graph)
        except Exception as error:
            if isinstance(error, UsageError) and not isinstance(error, RemoteError):
                raise
            raise RuntimeError(_told(error)) from error


def _told(error: Exception) -> str:
    directory = api.current_engine().directory
    text = error.message if isinstance(error, GradwireError) else str(error)
    if isinstance(error, RemoteError):
        known = {info.name: info.id for info in directory.all()}
        text = f"Error on Node {known.get(error.worker, error.worker)}: {text}"
    return f"Error on Node {directory.me.id}: {text}"


def _init(worker_id: WorkerId) -> None:
    """Check the number of a worker. There is nothing else to do: the worker has its engine."""
    if not 0 <= worker_id < _MOST_WORKERS:
        raise UsageError(f"worker_id {worker_id} is not in 0..{_MOST_WORKERS - 1}")
    worker = current_worker.maybe_default()
    if worker is not None and worker.directory.me.id != worker_id:
        raise UsageError(
            f"Container is already initialized with worker_id: {worker.directory.me.id}, "
            f"cannot initialize with different worker_id: {worker_id}",
            hint="call shutdown() first",
        )


def _new_context() -> DistAutogradContext:
    return DistAutogradContext(api.new_context())


def _retrieve_context(context_id: ContextId) -> DistAutogradContext:
    return DistAutogradContext(api.current_engine().contexts.find(context_id))


def _is_valid_context(context_id: ContextId) -> None:
    api.current_engine().contexts.find(context_id)


def _current_context() -> DistAutogradContext:
    current = current_context()
    if current is None:
        raise UsageError(
            "Current thread doesn't have a valid autograd context",
            hint="make the call inside `with context() as context_id:`",
        )
    return _retrieve_context(current)


def _get_max_id() -> ContextId:
    return context_id(api.current_engine().directory.me.id + 1, 0) - 1


def _get_debug_info() -> dict[str, int]:
    engine = api.current_engine()
    return {
        "num_current_backward_passes": len(engine.passes),
        "num_autograd_contexts": len(engine.contexts),
    }
