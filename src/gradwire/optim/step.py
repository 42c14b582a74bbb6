"""Stepper: computes a step of a torch optimizer without changing the parameters.

The optimizer works on stand-ins. A stand-in shares its parameter's storage between steps, and has
its own during one. So neither `.grad` nor the values of a parameter change before the commit, and
the changes to the optimizer's state can be undone.

`Batching` steps many small parameters with one call for each operation. Torch's optimizers can do
that (`foreach`), but by default only on accelerators. On the CPU it is the same operators in the
same order, called from C++: half the time, and the same bits. That holds for the classes, types and
options below (tests/optim/test_batching.py compares them), but not for all: half precision rounds
differently, and Nesterov's momentum writes into the gradients. Large parameters gain nothing, and
need memory for intermediate results.

`PlainSgd` is SGD without momentum. It keeps no state and is one operator, so it is computed out of
place from the parameters, with the same bits and no copy.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import optim

from gradwire.optim.torch_private import (
    cloned,
    cloned_one_by_one,
    is_followed,
    listed_add,
    listed_negative,
    take_step,
)

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters and their stand-ins."""


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
"""Subclasses may override operators, and not support lists of tensors."""
_FEWEST = 6
_MOST_BYTES = 1 << 20
_SAID_OTHERWISE = ("foreach", "fused", "nesterov", "differentiable", "capturable")
_NUMBERS = (int, float)
_is_same_size = torch.Tensor.is_same_size
_OTHERWISE = ("momentum", "nesterov", "differentiable", "fused", "foreach")


class Prepared(NamedTuple):
    """A computed step: the parameters that it changes, and the optimizer's state before it."""

    pairs: Pairs
    state: dict[torch.Tensor, Any]


@final
class Stepper:
    """Steps the stand-ins of one optimizer, and can undo it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, stand_ins: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._batching = Batching(optimizer, stand_ins.values())
        self._plain_sgd = PlainSgd(optimizer, stand_ins.keys())
        self._cloned = cloned if are_of_torch(stand_ins) else cloned_one_by_one

    def begin(self, pairs: Pairs) -> Prepared:
        """Begin a step of these parameters; returns what is needed to undo it."""
        state = self._optimizer.state
        return Prepared(pairs, copied_state(state, pairs) if state else {})

    def step(self, pairs: Pairs, gradients: list[torch.Tensor], *, is_plain: bool) -> None:
        """Step the stand-ins. Without `is_plain` options, such as tensors, torch itself does it."""
        parameters = [parameter for parameter, _ in pairs]
        stepped = self._plain_sgd.maybe_stepped(parameters, gradients) if is_plain else None
        for (_, stand_in), value in zip(pairs, stepped or self._cloned(parameters), strict=True):
            stand_in.data = value
        if stepped is not None:
            return
        is_batch = is_plain and self._batching.begin(gradients)
        try:
            for (_, stand_in), gradient in zip(pairs, gradients, strict=True):
                stand_in.grad = gradient
            take_step(self._optimizer)
        finally:
            for _, stand_in in pairs:
                stand_in.grad = None
            if is_batch:
                self._batching.end()

    def put_back(self, prepared: Prepared) -> None:
        """Undo a step."""
        state = self._optimizer.state
        for parameter, stand_in in prepared.pairs:
            stand_in.data = parameter.data
            state.pop(stand_in, None)
            if stand_in in prepared.state:
                state[stand_in] = prepared.state[stand_in]


def copied_state(state: Mapping[torch.Tensor, Any], pairs: Pairs) -> dict[torch.Tensor, Any]:
    """A copy of the state of these stand-ins, which is mostly a dict of tensors and numbers each.

    hot: copy.deepcopy takes twenty times as long, and one clone per tensor twice as long
    """
    kept: dict[torch.Tensor, Any] = {}
    tensors: list[torch.Tensor] = []
    places: list[tuple[dict[str, Any], str]] = []
    for _, stand_in in pairs:
        if stand_in not in state:
            continue
        each = state[stand_in]
        if type(each) is not dict or len({*map(id, each.values())}) < len(each):
            kept[stand_in] = copy.deepcopy(each)
            continue
        copied = kept[stand_in] = each.copy()
        for key, value in each.items():
            if type(value) is torch.Tensor:
                tensors.append(value)
                places.append((copied, key))
            else:
                copied[key] = copy.deepcopy(value)
    for (into, key), tensor in zip(places, cloned(tensors), strict=True):
        into[key] = tensor
    return kept


def plain_mode() -> AbstractContextManager[object]:
    """A block without grad mode or inference mode, whatever the caller has set."""
    return _plain_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _plain_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


@final
class Batching:
    """Makes an optimizer step all of its stand-ins at once, if that gives the same bits."""

    __slots__ = ("_dtype", "_optimizer")

    def __init__(self, optimizer: optim.Optimizer, stand_ins: Collection[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._dtype = _maybe_dtype(stand_ins) if type(optimizer) in _EXACT else None

    def begin(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Turn `foreach` on until `end`; False if these gradients or the options forbid it."""
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
        """Restore the option that the user has."""
        for group in self._optimizer.param_groups:
            group["foreach"] = None


def _maybe_dtype(tensors: Collection[torch.Tensor]) -> torch.dtype | None:
    """The dtype of all, if they are many, small, and may be stepped at once."""
    if len(tensors) < _FEWEST or not are_small(tensors):
        return None
    return maybe_plain_type(tensors)


def are_small(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether there is memory for one more copy of each."""
    return sum(tensor.nbytes for tensor in tensors) <= _MOST_BYTES


def are_of_torch(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none is of a subclass."""
    return all(type(tensor) in _KINDS for tensor in tensors)


def maybe_plain_type(tensors: Collection[torch.Tensor]) -> torch.dtype | None:
    """The dtype of all, if operators on lists are known to give the same bits for them."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= _TYPES or not are_of_torch(tensors):
        return None
    plain = all(t.device.type == "cpu" and t.layout is torch.strided for t in tensors)
    return dtypes.pop() if plain else None


def are_plain(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether all are plain strided tensors of this dtype. hot: a loop over many"""
    plain, strided = torch.Tensor, torch.strided
    for gradient in gradients:
        if (
            type(gradient) is not plain
            or gradient.dtype is not dtype
            or gradient.layout is not strided
        ):
            return False
    return True


@final
class PlainSgd:
    """Computes the steps of an optimizer that is SGD without momentum."""

    __slots__ = ("_are_small", "_dtype", "_optimizer")

    def __init__(self, optimizer: optim.Optimizer, parameters: Collection[torch.Tensor]) -> None:
        self._optimizer = optimizer
        is_plain = type(optimizer) is optim.SGD and len(optimizer.param_groups) == 1
        self._dtype = maybe_plain_type(parameters) if is_plain else None
        self._are_small = are_small(parameters)

    def maybe_stepped(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor] | None:
        """The new values of some of the parameters; None if torch itself has to step."""
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
