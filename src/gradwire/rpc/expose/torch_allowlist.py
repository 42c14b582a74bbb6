"""The parts of torch that a peer may name: the lines of two checked-in lists, and nothing else.

    torch_operators.txt   functions, as module:name
    torch_classes.txt     classes to construct, as module:Class, and the methods that may be called
                          on one held by a reference, as module:Class.method

What a peer sends is only ever compared with these lines; what is fetched for it is the line's, from
a module imported here. A line that this version of torch lacks counts as not listed. The lists
bound what can be reached (files, code, state of the process); how well an operator checks its own
arguments is torch's affair, and those known to crash on bad ones are left out.

This file must not know registries or user code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib.resources import files
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)

import torch
import torch.autograd
import torch.fft
import torch.linalg
import torch.nn.functional
import torch.optim.lr_scheduler
import torch.special

_HOMES: Mapping[str, object] = {
    "torch": torch,
    "torch.autograd": torch.autograd,
    "torch.fft": torch.fft,
    "torch.linalg": torch.linalg,
    "torch.nn": torch.nn,
    "torch.nn.functional": torch.nn.functional,
    "torch.ops.aten": torch.ops.aten,
    "torch.optim": torch.optim,
    "torch.optim.lr_scheduler": torch.optim.lr_scheduler,
    "torch.special": torch.special,
}
_ATEN = "torch.ops.aten:"
_PACKET, _OVERLOAD = type(torch.ops.aten.sin), type(torch.ops.aten.sin.default)
_COMPILED_KINDS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, _OVERLOAD)
_COMPILED_MODULE = ("torch._dynamo.eval_frame", "OptimizedModule")
_NAMED_KINDS = (type, FunctionType, MethodType, *_COMPILED_KINDS)


@functools.cache
def operators() -> frozenset[str]:
    """The lines of torch_operators.txt."""
    return frozenset(lines_of("torch_operators.txt"))


@functools.cache
def classes() -> frozenset[str]:
    """The lines of torch_classes.txt: classes and methods."""
    return frozenset(lines_of("torch_classes.txt"))


def lines_of(file: str) -> list[str]:
    """The names a list holds, in its order, without its comments."""
    text = files("gradwire.rpc.expose").joinpath(file).read_text(encoding="ascii")
    return [line for line in text.splitlines() if not line.startswith("#")]


def maybe_find(name: str) -> Callable[..., object] | None:
    """The torch function or class of that name, if it is listed and this torch has it."""
    # Asked before the caches below: a cache of what peers sent would grow at their will.
    if name in operators() or name in classes():
        return _maybe_function(name)
    return None


@functools.cache
def names() -> Mapping[object, str]:
    """The line that stands for each object of torch's; aten packets name themselves."""
    # In order, so that of an object with two names (torch.conv2d is also in nn.functional) the one
    # that sorts last stands: "torch:" comes after every "torch.something:".
    lines = sorted(operators() | classes())
    known = ((_maybe_function(line), line) for line in lines if not line.startswith(_ATEN))
    return {found: line for found, line in known if found is not None}


def maybe_name(target: object) -> str | None:
    """The line that stands for this object of torch's, if one does; an aten packet names itself."""
    if isinstance(target, _PACKET):
        namespace, _, operator = str(target).partition(".")
        return f"torch.ops.{namespace}:{operator}"
    return names().get(target) if isinstance(target, _NAMED_KINDS) else None


def is_compiled(target: object) -> bool:
    """Whether this is a compiled function of torch's, whose own name leads nowhere."""
    if not isinstance(target, _COMPILED_KINDS):
        return False
    home = getattr(getattr(target, "__objclass__", target), "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] == "torch"


def lists_method(cls: type, method: str) -> bool:
    """Whether the lists allow calling `method` on objects of exactly this torch class."""
    return method in _methods().get(cls, ())


def is_forward(value: object, definer: type, name: str) -> bool:
    """Whether this is the forward or the call of a module, as one of torch's classes defines it.

    Module.__call__ is listed, and runs the forward of the object, whichever that is: so neither a
    `__call__` of torch's own that does the same (of compiled and fx modules), nor a forward that
    torch has put together (fx, TorchScript) or declared for others to set on the object
    (torch.compile) opens more than that line does.
    """
    if name not in ("forward", "__call__") or not isinstance(value, torch.nn.Module):
        return False
    return definer.__module__.partition(".")[0] == "torch"


def maybe_compiled_from(value: object) -> object | None:
    """The module that `torch.compile` was given, to which what it made passes attributes on."""
    cls = type(value)
    if (cls.__module__, cls.__qualname__) != _COMPILED_MODULE:  # without an import of dynamo
        return None
    inner: object | None = vars(value)["_modules"].get("_orig_mod")
    return inner


@functools.cache
def _maybe_function(line: str) -> Callable[..., object] | None:
    found = _maybe_fetch(line)
    if not callable(found) or not _stands_alone(line):
        return None
    return found


def _maybe_fetch(line: str) -> object | None:
    home, _, qualname = line.partition(":")
    found: object | None = _HOMES[home]
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _stands_alone(line: str) -> bool:
    """Whether the line names something to call by itself, rather than on an object.

    The methods of tensors do: a tensor travels, so it can come as the first argument. A module or
    an optimizer does not, and its methods are reached through a reference.
    """
    owner, _, method = line.rpartition(".")
    if ":" not in owner or owner == "torch:Tensor":
        return True
    raw = inspect.getattr_static(_maybe_fetch(owner), method)
    return isinstance(raw, staticmethod | classmethod)


@functools.cache
def _methods() -> Mapping[type, frozenset[str]]:
    methods: dict[type, set[str]] = {}
    for line in classes():
        owner, _, method = line.rpartition(".")
        cls = _maybe_fetch(owner) if ":" in owner else None
        if isinstance(cls, type):
            methods.setdefault(cls, set()).add(method)
    return {cls: frozenset(names) for cls, names in methods.items()}
