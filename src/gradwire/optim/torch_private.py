"""The private names of torch that optimizers use; no other file of optim/ uses one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.optim import optimizer as _of_torch

from gradwire.torch_private import is_profiled, with_accumulator

P = ParamSpec("P")
T = TypeVar("T")

_all = cast(Any, _of_torch)


def is_followed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks or a profiler observe its steps."""
    own = cast(Any, optimizer)
    return bool(
        own._optimizer_step_pre_hooks
        or own._optimizer_step_post_hooks
        or _all._global_optimizer_pre_hooks
        or _all._global_optimizer_post_hooks
        or is_profiled()
    )


def seen_by_hooks(step: Callable[P, T]) -> Callable[P, T]:
    """Decorate a `step` with torch's wrapper for hooks, to be run only if there are any.

    Torch marks a wrapped step, and wraps it once. In a subclass with its own step that calls this
    one, torch wraps the subclass's step, so this one must not run the hooks again.

    hot: torch's wrapper takes as long as a message
    """
    wrapped = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def take(*args: P.args, **kwargs: P.kwargs) -> T:
        self: Any = args[0]
        if is_followed(self) and type(self).step is take:
            return wrapped(*args, **kwargs)
        return step(*args, **kwargs)

    take.hooked = True  # type: ignore[attr-defined]
    return take


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, without torch's wrapper if there are no hooks.

    hot: as `seen_by_hooks`
    """
    step: Any = type(optimizer).step
    if "step" in vars(optimizer) or not hasattr(step, "hooked") or is_followed(optimizer):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


use_count: Callable[[torch.Tensor], int] = cast(Any, torch.Tensor)._use_count
"""How many references there are to a tensor, of its Python object, of nodes and of operators."""


def accumulator_of(leaf: torch.Tensor) -> object:
    """The node that adds to the gradient of a leaf; None if the leaf requires no gradient."""
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        node = with_accumulator(leaf).grad_fn
        return None if node is None else node.next_functions[0][0]


def kept_by_graphs(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that a graph holds itself, or an operator that is running.

    Two references are harmless: the Python object's, and that of the node that adds the gradient.
    But that node dies with the last graph that leads to it, and a graph made while the leaf
    required no gradient has none. So where there are two, the node is made, if it is not there.
    """
    return [leaf for leaf in leaves if use_count(leaf) > 1 and _is_held_by_others(leaf)]


def _is_held_by_others(leaf: torch.Tensor) -> bool:
    """Whether a third reference is left with those of its Python object and its node.

    Without a gradient it has no node that could be asked for: then the second counts.
    """
    if use_count(leaf) > 2 or not leaf.requires_grad:
        return True
    _node = accumulator_of(leaf)
    return use_count(leaf) > 2


def holders_of(storage: torch.UntypedStorage) -> int:
    """How many tensors use this storage, plus one for its own Python object."""
    return cast(int, cast(Any, torch._C)._storage_Use_Count(storage._cdata))


def is_over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
    """Whether a tensor uses this storage."""
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def same_over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """A view of `storage` with the layout of `tensor`; for a subclass of Tensor, a clone of it."""
    if type(tensor) is not torch.Tensor:
        return tensor.clone()
    offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
    same = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    same.set_(storage, offset, size, stride)
    if tensor.is_conj():
        same = same.conj()
    return torch._neg_view(same) if tensor.is_neg() else same


def cloned(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A clone of each, by one call if this torch has one for it."""
    return _clone(tensors) if tensors else ()


def listed_add(
    tensors: list[torch.Tensor], others: list[torch.Tensor], alpha: float
) -> list[torch.Tensor]:
    """`tensor.add(other, alpha=alpha)` of each, by one call."""
    return list(torch._foreach_add(tensors, others, alpha=alpha))


def listed_negative(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """`-tensor` of each, by one call."""
    return list(torch._foreach_neg(tensors))


def cloned_one_by_one(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A clone of each, by the `clone` of its class."""
    return [tensor.clone() for tensor in tensors]


_clone: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = getattr(
    torch, "_foreach_clone", cloned_one_by_one
)
