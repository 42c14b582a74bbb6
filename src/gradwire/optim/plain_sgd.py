"""Gradient descent without momentum: the stepped values straight from the parameters.

A step is computed aside. Torch's optimizers write into what they are given, so that is a copy; and
they look for the gradient in each parameter. But descent keeps no state, and is one operator. Out
of place, on lists, it gives the same bits and leaves nothing to copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import optim

from gradwire.optim.batching import are_plain, are_small, maybe_plain_type
from gradwire.optim.torch_private import is_followed, listed_add, listed_negative

_NUMBERS = (int, float)
_is_same_size = torch.Tensor.is_same_size
_OTHERWISE = ("momentum", "nesterov", "differentiable", "fused", "foreach")


@final
class Descent:
    """For the parameters that one optimizer steps."""

    __slots__ = ("_are_small", "_dtype", "_optimizer")

    def __init__(self, optimizer: optim.Optimizer, parameters: Collection[torch.Tensor]) -> None:
        self._optimizer = optimizer
        is_plain = type(optimizer) is optim.SGD and len(optimizer.param_groups) == 1
        self._dtype = maybe_plain_type(parameters) if is_plain else None
        self._are_small = are_small(parameters)

    def maybe_stepped(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor] | None:
        """What a step makes of some of the parameters; None if torch is to take it."""
        optimizer, dtype = self._optimizer, self._dtype
        if dtype is None or not parameters or "step" in vars(optimizer):
            return None
        group = optimizer.param_groups[0]
        if any(group.get(option) for option in _OTHERWISE) or is_followed(optimizer):
            return None
        rate, decay, is_ascent = group["lr"], group["weight_decay"], group["maximize"]
        if type(rate) not in _NUMBERS or type(decay) not in _NUMBERS:
            return None
        if (decay or is_ascent) and not self._are_small:  # one more list of gradients
            return None
        if not are_plain(gradients, dtype) or not all(map(_is_same_size, gradients, parameters)):
            return None
        if is_ascent:
            gradients = listed_negative(gradients)
        if decay:
            gradients = listed_add(gradients, parameters, decay)
        return listed_add(parameters, gradients, -rate)
