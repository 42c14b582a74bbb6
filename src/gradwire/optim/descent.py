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

from gradwire.optim.batching import are_plain, maybe_plain_type
from gradwire.optim.torch_private import is_followed, listed_add, listed_negative

_NUMBERS = (int, float)
_OTHERWISE = ("momentum", "nesterov", "differentiable", "fused", "foreach")


@final
class Descent:
    """For the stand-ins of one optimizer."""

    __slots__ = ("_dtype", "_optimizer")

    def __init__(self, optimizer: optim.Optimizer, stand_ins: Collection[torch.Tensor]) -> None:
        self._optimizer = optimizer
        is_plain = type(optimizer) is optim.SGD and len(optimizer.param_groups) == 1
        self._dtype = maybe_plain_type(stand_ins) if is_plain else None

    def maybe_stepped(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor] | None:
        """What a step makes of some of the parameters; None if torch is to take it."""
        optimizer = self._optimizer
        if self._dtype is None or not parameters or "step" in vars(optimizer):
            return None
        group = optimizer.param_groups[0]
        if any(group[option] for option in _OTHERWISE) or is_followed(optimizer):
            return None
        rate, decay = group["lr"], group["weight_decay"]
        if type(rate) not in _NUMBERS or type(decay) not in _NUMBERS:
            return None
        if not are_plain(gradients, self._dtype):
            return None
        if group["maximize"]:
            gradients = listed_negative(gradients)
        if decay != 0:
            gradients = listed_add(gradients, parameters, decay)
        return listed_add(parameters, gradients, -rate)
