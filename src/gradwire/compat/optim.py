"""DistributedOptimizer under its name in torch.distributed.optim."""

from __future__ import annotations

from gradwire.ids import ContextId
from gradwire.optim import optimizer as native

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(native.DistributedOptimizer):
    """Steps parameters that live on any workers, with the gradients of a context."""

    def step(self, context_id: ContextId) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient in the context, or none of them."""
        super().step(context_id)
