"""DistributedOptimizer as torch.distributed.optim has it: one optimizer on each owner.

Each of them steps by itself, with the gradients that the context holds on its worker.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from gradwire.compat import autograd
from gradwire.compat.rpc import api

__all__ = ["DistributedOptimizer"]


class _LocalOptimizer:
    """The optimizer of the parameters of one worker."""

    lock = threading.Lock()  # those of several trainers step the same parameters

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        references: list[api.RRef[torch.Tensor]],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self._parameters = [reference.local_value() for reference in references]
        self.optim = cls(self._parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Step with the gradients of the context; `.grad` is as before."""
        gradients = autograd.get_gradients(context_id)
        with self.lock:
            before = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self.optim.step()
            finally:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient


class DistributedOptimizer:
    """Steps parameters that live on any workers, given references to them."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[api.RRef[torch.Tensor]],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        owned: dict[Any, list[api.RRef[torch.Tensor]]] = {}
        for reference in params_rref:
            owned.setdefault(reference.owner(), []).append(reference)
        self.remote_optimizers = _all_of(
            api.rpc_async(owner, _new, args=(optimizer_class, references, args, kwargs))
            for owner, references in owned.items()
        )

    def step(self, context_id: int) -> None:
        """Step every parameter that has a gradient in the context; returns when all have."""
        autograd._is_valid_context(context_id)
        _all_of(
            api.rpc_async(optimizer.owner(), _step, args=(optimizer, context_id))
            for optimizer in self.remote_optimizers
        )


def _new(
    cls: type[torch.optim.Optimizer],
    references: list[api.RRef[torch.Tensor]],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> api.RRef[_LocalOptimizer]:
    return api.RRef(_LocalOptimizer(cls, references, *args, **kwargs))


def _step(optimizer: api.RRef[_LocalOptimizer], context_id: int) -> None:
    optimizer.local_value().step(context_id)


def _all_of(futures: Iterable[torch.futures.Future[Any]]) -> list[Any]:
    """What all of them return; the last error, once all are done."""
    results: list[Any] = []
    failed: Exception | None = None
    for future in list(futures):
        try:
            results.append(future.wait())
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed
    return results
