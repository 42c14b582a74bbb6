"""A step computed aside, by a torch optimizer on stand-ins of the parameters.

A stand-in shares its parameter's storage between steps, and has its own while one is under way. The
optimizer never sees the parameter: neither its `.grad` nor its values change before they are put in
place. What a step has changed of the optimizer's state can be taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import torch

from gradwire.optim.batching import Batching, are_of_torch
from gradwire.optim.plain_sgd import Descent
from gradwire.optim.torch_private import cloned, cloned_one_by_one, take_step

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters, and what stands for each."""


class Prepared(NamedTuple):
    """A step: what it has changed, and the state from before."""

    pairs: Pairs
    state: dict[torch.Tensor, Any]


@final
class Aside:
    """For the stand-ins of one optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, stand_ins: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        self._optimizer = optimizer
        self._batching = Batching(optimizer, stand_ins.values())
        self._descent = Descent(optimizer, stand_ins.keys())
        self._cloned = cloned if are_of_torch(stand_ins) else cloned_one_by_one

    def begin(self, pairs: Pairs) -> Prepared:
        """A step of these; what is needed to take it back."""
        state = self._optimizer.state
        return Prepared(pairs, kept_apart(state, pairs) if state else {})

    def step(self, pairs: Pairs, gradients: list[torch.Tensor], *, is_plain: bool) -> None:
        """Step the stand-ins. The options of an optimizer that are not plain may be anything."""
        parameters = [parameter for parameter, _ in pairs]
        stepped = self._descent.maybe_stepped(parameters, gradients) if is_plain else None
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
        """As if the step had never been."""
        state = self._optimizer.state
        for parameter, stand_in in prepared.pairs:
            stand_in.data = parameter.data
            state.pop(stand_in, None)
            if stand_in in prepared.state:
                state[stand_in] = prepared.state[stand_in]


def kept_apart(state: Mapping[torch.Tensor, Any], pairs: Pairs) -> dict[torch.Tensor, Any]:
    """A copy of the state of these stand-ins. Mostly that of each is a dict of tensors and numbers.

    hot: copy.deepcopy takes twenty times as long, and a clone of each twice
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


def plainly() -> AbstractContextManager[object]:
    """Neither the caller's grad mode nor its inference mode reaches the parameters."""
    return _plainly() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _plainly() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
