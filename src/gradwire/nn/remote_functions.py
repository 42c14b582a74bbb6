"""The functions that a RemoteModule calls on the worker where its module lives.

They are exposed to all peers: one that holds a reference to a module may call its methods anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.options import DEFAULT
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.refs.handles_state import BorrowedRef
from gradwire.rpc.rref import RRef, reference_to

Module = RRef[nn.Module] | BorrowedRef
State = OrderedDict[str, Any]
Named = list[tuple[str, RRef[Any]]]


@expose
def create(
    make: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    """Make a module and move it to its device."""
    module, name = make(*args, **kwargs), getattr(make, "__name__", type(make).__name__)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{name} made a {type(module).__name__}, which is no torch.nn.Module",
            hint="RemoteModule takes a subclass of it, or a function that returns one",
        )
    try:
        return module.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"the {name} could not be put on {device}: {error}",
            hint="name a device that its worker has",
        ) from error


@expose
def forward(module: Module, device: str, /, *args: object, **kwargs: object) -> object:
    """Move the arguments to the module's device and run it on them."""
    run = module_of(module)  # first, as moving it to its device may have failed
    args, kwargs = moved((args, kwargs), device)
    return _at_rest(run(*args, **kwargs), device)


@expose
def train(module: Module, mode: bool) -> None:
    """Set the module's mode."""
    module_of(module).train(mode)


@expose
def require_grad(module: Module, requires_grad: bool) -> None:
    """Set `requires_grad` of its parameters."""
    module_of(module).requires_grad_(requires_grad)


@expose
def zero_grad(module: Module, set_to_none: bool) -> None:
    """Clear `.grad` of its parameters."""
    module_of(module).zero_grad(set_to_none)


@expose
def apply(module: Module, fn: Callable[[nn.Module], None]) -> None:
    """Apply a function to it and all modules in it."""
    module_of(module).apply(fn)


@expose
def named_parameters(module: Module, prefix: str, recurse: bool, remove_duplicate: bool) -> Named:
    """References to its parameters."""
    found = module_of(module).named_parameters(prefix, recurse, remove_duplicate)
    return [(name, reference_to(parameter)) for name, parameter in found]


@expose
def named_buffers(module: Module, prefix: str, recurse: bool, remove_duplicate: bool) -> Named:
    """References to its buffers."""
    found = module_of(module).named_buffers(prefix, recurse, remove_duplicate)
    return [(name, reference_to(buffer)) for name, buffer in found]


@expose
def state_dict(module: Module, device: str, prefix: str, keep_vars: bool) -> State:
    """Its state."""
    state: State = OrderedDict()
    state._metadata = OrderedDict()  # type: ignore[attr-defined]
    module_of(module).state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
    for key, value in state.items():
        state[key] = _at_rest(value, device)
    return state


@expose
def load_state_dict(
    module: Module, device: str, state: Mapping[str, Any], strict: bool, assign: bool
) -> tuple[list[str], list[str]]:
    """Load a state; returns the missing and the unexpected keys."""
    if assign:
        for key, value in state.items():
            state[key] = moved(value, device)  # type: ignore[index]
    missing, unexpected = module_of(module).load_state_dict(state, strict, assign)
    return list(missing), list(unexpected)


def module_of(module: Module) -> nn.Module:
    """The module that a reference stands for."""
    if isinstance(module, BorrowedRef):
        home = current_worker.find()
        value = home.refs.value_here(module.handle, home.deadline(DEFAULT))
    else:
        value = module.local_value()
    if not isinstance(value, nn.Module):
        raise UsageError(f"a RemoteModule was made of a reference to a {type(value).__name__}")
    return value


_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, str})


def moved(value: Any, device: str) -> Any:  # noqa: ANN401
    """The value, with every tensor in it moved to that device.

    hot: torch's tree_map takes as long as a message
    """
    kind = type(value)
    if kind is torch.Tensor:
        return value.to(device)
    if kind in _WITHOUT_TENSORS:
        return value
    if kind is tuple:
        return tuple([moved(each, device) for each in value])
    if kind is dict:
        return {key: moved(each, device) for key, each in value.items()}
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _at_rest(value: object, device: str) -> object:
    """The result for the caller, on the CPU: the caller may not have this device."""
    if device == "cpu" or torch.device(device).type in ("cpu", "meta"):
        return value
    return moved(value, "cpu")
