"""Many small parameters stepped by one call for each operation, rather than one for each of them.

Torch's optimizers can work on lists of tensors (`foreach`), and do so by themselves on accelerators
only. On the CPU that is the same operators in the same order, one tensor after the other, called
from C++: half the time, and the same bits. That is so for the classes, types and options below
(tests/optim/test_batching.py compares them), not for all: half precision rounds otherwise, and
Nesterov's momentum writes into the gradients. Large parameters gain nothing, and would need memory
for what is between the operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import final

import torch
from torch import optim

_EXACT = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.Adagrad,
        optim.Adadelta,
        optim.RMSprop,
    }
)
_TYPES = frozenset({torch.float32, torch.float64})
_KINDS = (torch.Tensor, torch.nn.Parameter)
"""A class of its own may compute what it likes, and not know lists."""
_FEWEST = 6
_MOST_BYTES = 1 << 20
_SAID_OTHERWISE = ("foreach", "fused", "nesterov", "differentiable", "capturable")


@final
class Batching:
    """For the stand-ins of one optimizer."""

    __slots__ = ("_dtype", "_optimizer")

    def __init__(self, optimizer: optim.Optimizer, stand_ins: Collection[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._dtype = _maybe_dtype(stand_ins) if type(optimizer) in _EXACT else None

    def begin(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Step those that have these gradients at once, until `end`; False if that is not to be."""
        dtype, groups = self._dtype, self._optimizer.param_groups
        if dtype is None:
            return False
        if not are_plain(gradients, dtype):
            return False
        for group in groups:
            for option in _SAID_OTHERWISE:
                if group.get(option):
                    return False
            if group["foreach"] is not None:
                return False
        for group in groups:
            group["foreach"] = True
        return True

    def end(self) -> None:
        """What is said to the optimizer is what its user has said."""
        for group in self._optimizer.param_groups:
            group["foreach"] = None


def _maybe_dtype(tensors: Collection[torch.Tensor]) -> torch.dtype | None:
    """The one type of all, if they are many, small, and of a kind that may be stepped at once."""
    if len(tensors) < _FEWEST or not are_small(tensors):
        return None
    return maybe_plain_type(tensors)


def are_small(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one more of each is no matter."""
    return sum(tensor.nbytes for tensor in tensors) <= _MOST_BYTES


def are_of_torch(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none has a class of its own."""
    return all(type(tensor) in _KINDS for tensor in tensors)


def maybe_plain_type(tensors: Collection[torch.Tensor]) -> torch.dtype | None:
    """The one type of all, if what is computed of them in lists is known to be the same."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= _TYPES or not are_of_torch(tensors):
        return None
    plain = all(t.device.type == "cpu" and t.layout is torch.strided for t in tensors)
    return dtypes.pop() if plain else None


def are_plain(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether all are tensors of this type like any other. hot: a loop over many"""
    plain, strided = torch.Tensor, torch.strided
    for gradient in gradients:
        if (
            type(gradient) is not plain
            or gradient.dtype is not dtype
            or gradient.layout is not strided
        ):
            return False
    return True
