"""What users call: context(), backward(), get_gradients()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from gradwire.autograd.engine import Engine
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.edges import LiveEdge
from gradwire.autograd.scope import current_context, enter, inside, leave, saving_here
from gradwire.current import current_worker
from gradwire.errors import ArgumentTypeError, UsageError
from gradwire.ids import ContextId, spoken_context
from gradwire.options import DEFAULT, Timeout


def current_engine() -> Engine:
    """The engine of the worker that the calling code belongs to."""
    engine: Engine = current_worker.find().engine
    return engine


@final
class context:
    """A block with gradients of its own, for `backward(context_id, …)`; gives its id, an int.

    Calls are part of the graph in a block or not, and tensors of both may be mixed. When the block
    ends, every worker releases the edges that were made in it, even if their tensors are alive.

    >>> with gradwire.context() as context_id:
    ...     y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
    ...     gradwire.backward(context_id, [y.sum()])
    ...     gradient = gradwire.get_gradients(context_id)[x]
    """

    __slots__ = ("_engine", "_id")

    def __enter__(self) -> ContextId:
        self._engine = current_engine()
        self._id = _opened(self._engine).id
        return self._id

    def __exit__(self, *_: object) -> None:
        leave(self._id)
        self._engine.close(self._id)


def new_context() -> Context:
    """Open a context and enter it, without a block that ends it: `release_context` does."""
    return _opened(current_engine())


def _opened(engine: Engine) -> Context:
    outer = current_context()
    if outer is not None:
        raise UsageError(
            "Already have an autograd context id for this thread",
            hint=f"contexts do not nest; {spoken_context(outer)} already records this code",
        )
    opened = engine.contexts.new()
    enter(opened.id, engine.saving)
    return opened


def release_context(context_id: ContextId) -> None:
    """Drop a context here and on every worker that was called in it; leave it if inside it."""
    engine = current_engine()
    engine.contexts.find(context_id)
    leave(context_id)
    engine.close(context_id)


def backward(
    context_id: ContextId,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    timeout: Timeout = DEFAULT,
) -> None:
    """Differentiate scalar roots into the context's own map, on every worker; see `get_gradients`.

    The call of torch.distributed.autograd. Several in one context add up. `.grad` stays as it was,
    but is borrowed while the node of a leaf runs, so that hooks find the gradient there: no other
    thread may use it meanwhile with a plain `loss.backward()` or an optimizer of its own.

    A pass that is not over within `timeout` seconds, by default `Timeouts(backward=…)`, ends on
    every worker with BackwardTimeout, and leaves nothing. With None or infinity it may take as long
    as each worker that takes part allows, by its own `Timeouts(backward=…)`.
    """
    engine = current_engine()
    _check_types(context_id, roots)
    found = engine.contexts.find(context_id)
    if not roots:
        raise UsageError("No tensors provided for gradient computation.")
    for root in roots:
        check_scalar_root(root)
    with inside(context_id), saving_here():
        engine.coordinator.backward(found, roots, retain_graph=retain_graph, timeout=timeout)


def get_gradients(context_id: ContextId) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that `backward(context_id, …)` has left on this worker, by leaf."""
    return dict(current_engine().contexts.find(context_id).gradients)


def live_edges() -> list[LiveEdge]:
    """The edges that hold graphs on the calling worker, oldest first.

    An edge is alive while the worker it leads to holds what has crossed by it, or something made of
    that. One that gets older and older may be part of a cycle over workers, such as a hook that
    holds a remote value that holds this graph: only the end of its `context()` or shutdown ends it.
    """
    return current_engine().live_edges()


def _check_types(context_id: object, roots: object) -> None:
    if not isinstance(context_id, int):
        wrong = f"context_id is a {type(context_id).__name__}"
    elif isinstance(roots, torch.Tensor) or not isinstance(roots, Sequence):
        wrong = f"roots is a {type(roots).__name__}"
    elif odd := [type(root).__name__ for root in roots if not isinstance(root, torch.Tensor)]:
        wrong = f"a root is a {odd[0]}"
    else:
        return
    raise ArgumentTypeError(
        f"backward(): incompatible function arguments: {wrong}",
        hint="pass an int and a list of tensors, as in backward(context_id, [loss])",
    )


def check_scalar_root(root: torch.Tensor) -> None:
    """UsageError if `backward` cannot begin there."""
    if not root.requires_grad:
        raise UsageError("requires_grad not set on root")
    if root.numel() != 1:
        shape = tuple(root.shape)
        raise UsageError(f"a root of shape {shape} is not a scalar, all roots need to be scalar")
    if not root.dtype.is_floating_point:
        raise UsageError(
            f"a root of type {root.dtype} is not real, all roots need to be real",
            hint="take its real part, its absolute value or its square first",
        )
    if root.grad_fn is None:
        raise UsageError(
            "a root does not have a valid gradient function.",
            hint="a leaf has nothing to differentiate: pass what was computed from it",
        )


def checked_tensor(value: object) -> torch.Tensor:
    """The value of a reference, if it is a tensor, at which backward can begin."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"RRef should contain a tensor for .backward(), but holds a {type(value).__name__}"
        )
    return value
