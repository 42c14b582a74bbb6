"""Stepper: computes a step of a torch optimizer without changing the parameters.

The optimizer works on stand-ins. A stand-in shares its parameter's storage between steps, and has
its own during one. So neither `.grad` nor the values of a parameter change before the commit, and
the changes to the optimizer's state can be undone.

Two shortcuts give the same bits in less time, for plain tensors on the CPU and the classes, types
and options below, which the tests compare. Half precision rounds differently, and Nesterov's
momentum writes into the gradients.

    batches   Many small parameters are stepped with one call for each operation (`foreach`), which
              torch does on accelerators only. These are the same operators in the same order,
              called from C++. Large parameters gain nothing, and need memory for results.
    SGD       Without momentum it keeps no state and is one operator, so it is computed from the
              parameters out of place, without a copy and without torch's optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast, final

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, RMSprop
from torch.optim import optimizer as _of_torch

from gradwire.torch_private import is_profiled

P = ParamSpec("P")
T = TypeVar("T")
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters and their stand-ins."""

_EXACT = (SGD, Adam, AdamW, Adamax, Adagrad, Adadelta, RMSprop)
_TYPES = frozenset({torch.float32, torch.float64})
_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Subclasses may override operators, and not support lists of tensors."""
_FEWEST_IN_A_BATCH = 6
_MOST_BYTES = 1 << 20
"""of tensors that there is memory for one more copy of"""
_INEXACT = ("fused", "nesterov", "differentiable", "capturable")


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
        are_torch_s = all(type(tensor) in _KINDS for tensor in stand_ins)
        self._cloned = cloned if are_torch_s else cloned_one_by_one
        dtypes = {tensor.dtype for tensor in stand_ins}
        is_exact = len(dtypes) == 1 and dtypes <= _TYPES and type(optimizer) in _EXACT
        is_dense = all(t.device.type == "cpu" and t.layout is torch.strided for t in stand_ins)
        self._dtype = dtypes.pop() if is_exact and is_dense and are_torch_s else None
        self._are_small = sum(tensor.nbytes for tensor in stand_ins) <= _MOST_BYTES
        self._is_batch = self._are_small and len(stand_ins) >= _FEWEST_IN_A_BATCH
        self._is_sgd = type(optimizer) is SGD and len(optimizer.param_groups) == 1

    def step(self, pairs: Pairs, gradients: list[torch.Tensor], *, is_plain: bool) -> Prepared:
        """Step these stand-ins; returns what is needed to undo it.

        Without `is_plain` options, such as tensors, torch itself does it.
        """
        state = self._optimizer.state
        prepared = Prepared(pairs, copied_state(state, pairs) if state else {})
        try:
            self._step(pairs, gradients, is_plain)
        except BaseException:
            self.put_back(prepared)
            raise
        return prepared

    def _step(self, pairs: Pairs, gradients: list[torch.Tensor], is_plain: bool) -> None:
        parameters = [parameter for parameter, _ in pairs]
        is_exact = is_plain and self._is_exact(gradients)
        stepped = self._maybe_descended(parameters, gradients) if is_exact else None
        for (_, stand_in), value in zip(pairs, stepped or self._cloned(parameters), strict=True):
            stand_in.data = value
        if stepped is not None:
            return
        batched = self._optimizer.param_groups if is_exact and self._is_batch else ()
        try:
            for group in batched:
                group["foreach"] = True
            for (_, stand_in), gradient in zip(pairs, gradients, strict=True):
                stand_in.grad = gradient
            take_step(self._optimizer)
        finally:
            for _, stand_in in pairs:
                stand_in.grad = None
            for group in batched:
                group["foreach"] = None

    def _is_exact(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether the shortcuts give the same bits. hot: a loop over all gradients"""
        dtype, plain, strided = self._dtype, torch.Tensor, torch.strided
        if dtype is None:
            return False
        for group in self._optimizer.param_groups:
            if group["foreach"] is not None or any(map(group.get, _INEXACT)):
                return False
        for each in gradients:
            if type(each) is not plain or each.dtype is not dtype or each.layout is not strided:
                return False
        return True

    def _maybe_descended(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor] | None:
        """The values after a step of SGD without momentum; None if it is not that."""
        optimizer = self._optimizer
        if not self._is_sgd or not parameters or "step" in vars(optimizer):
            return None
        group = optimizer.param_groups[0]
        rate, decay, is_ascent = group["lr"], group["weight_decay"], group["maximize"]
        if group["momentum"] or is_followed(optimizer):
            return None
        if (decay or is_ascent) and not self._are_small:  # one more list of gradients
            return None
        if not all(map(torch.Tensor.is_same_size, gradients, parameters)):
            return None
        if is_ascent:
            gradients = list(torch._foreach_neg(gradients))
        if decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        return torch._foreach_add(parameters, gradients, alpha=-rate)

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


def cloned_one_by_one(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A clone of each, by the `clone` of its class."""
    return [tensor.clone() for tensor in tensors]


_clone = getattr(torch, "_foreach_clone", cloned_one_by_one)


def cloned(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A clone of each, by one call if this torch has one for it."""
    return _clone(tensors) if tensors else ()


def plain_mode() -> AbstractContextManager[object]:
    """A block without grad mode or inference mode, whatever the caller has set."""
    return _plain_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _plain_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


_all_optimizers = cast(Any, _of_torch)


def is_followed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks or a profiler observe its steps."""
    own = cast(Any, optimizer)
    return bool(
        own._optimizer_step_pre_hooks
        or own._optimizer_step_post_hooks
        or _all_optimizers._global_optimizer_pre_hooks
        or _all_optimizers._global_optimizer_post_hooks
        or is_profiled()
    )


def seen_by_hooks(step: Callable[P, T]) -> Callable[P, T]:
    """Decorate a `step` with torch's wrapper for hooks, to be run only if there are any.

    hot: torch's wrapper takes as long as a message
    """
    wrapped = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def take(*args: P.args, **kwargs: P.kwargs) -> T:
        self: Any = args[0]
        # Torch has wrapped the own step of a subclass, so this one must not run the hooks again.
        if is_followed(self) and type(self).step is take:
            return wrapped(*args, **kwargs)
        return step(*args, **kwargs)

    take.hooked = True  # type: ignore[attr-defined]  # torch wraps no step that has it
    return take


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, without torch's wrapper if there are no hooks. hot: as `seen_by_hooks`"""
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not hasattr(step, "hooked") or is_followed(optimizer):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)
