"""The functions, classes and methods of torch that a peer may use: the lines of two lists.

    torch_operators.txt   functions, as module:name
    torch_classes.txt     classes to construct, as module:Class, and the methods that may be called
                          on one held by a reference, as module:Class.method

A peer's string is only compared with these lines; the object is then found by the line. A line
that this version of torch does not have counts as not listed. Nothing on the lists gives access to
files, code or the state of the process. Whether an operator checks its arguments is up to torch;
operators known to crash on bad arguments are not listed.

This file must not know registries or user code.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

_ATEN = "torch.ops.aten:"
_PACKET, _OVERLOAD = type(torch.ops.aten.sin), type(torch.ops.aten.sin.default)
_COMPILED_KINDS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    _OVERLOAD,
)
_COMPILED_MODULE = ("torch._dynamo.eval_frame", "OptimizedModule")
_NAMED_KINDS = (type, types.FunctionType, types.MethodType, *_COMPILED_KINDS)


@functools.cache
def operators() -> frozenset[str]:
    """The lines of torch_operators.txt."""
    return frozenset(lines_of("torch_operators.txt"))


@functools.cache
def classes() -> frozenset[str]:
    """The lines of torch_classes.txt: classes and methods."""
    return frozenset(lines_of("torch_classes.txt"))


def lines_of(file: str) -> list[str]:
    """The lines of a list, in order, without comments."""
    # Not by importlib.resources: it imports modules, and a finalizer may interrupt that.
    text = Path(__file__).with_name(file).read_text(encoding="ascii")
    return [line for line in text.splitlines() if not line.startswith("#")]


def maybe_find(name: str) -> Callable[..., object] | None:
    """The torch function or class of that name, if it is listed and this torch has it."""
    # Checked before the cache, or peers could make it grow without limit.
    return _maybe_function(name) if name in operators() or name in classes() else None


@functools.cache
def names() -> Mapping[object, str]:
    """The line of each listed object of torch, except aten packets, which have their own names."""
    # Sorted, so that of an object with two names (torch.conv2d is also in nn.functional) the last
    # one is kept: "torch:" comes after every "torch.something:".
    lines = sorted(operators() | classes())
    known = ((_maybe_function(line), line) for line in lines if not line.startswith(_ATEN))
    return {found: line for found, line in known if found is not None}


def maybe_name(target: object) -> str | None:
    """The line of an object of torch, if it is listed; an aten packet's own name."""
    if isinstance(target, _PACKET):
        namespace, _, operator = str(target).partition(".")
        return f"torch.ops.{namespace}:{operator}"
    return names().get(target) if isinstance(target, _NAMED_KINDS) else None


def is_compiled(target: object) -> bool:
    """Whether this is a function of torch compiled from C++, whose own name leads nowhere."""
    if not isinstance(target, _COMPILED_KINDS):
        return False
    home = getattr(getattr(target, "__objclass__", target), "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] == "torch"


def is_forward(value: object, definer: type, name: str) -> bool:
    """Whether this is the `forward` or `__call__` of a module, defined by a class of torch.

    Module.__call__ is listed, and runs any forward that the object has. So these allow no more than
    that line does: the `__call__` of compiled and fx modules, which does the same; a forward that
    torch has generated (fx, TorchScript) or that is set on the object (torch.compile).
    """
    if name not in ("forward", "__call__") or not isinstance(value, torch.nn.Module):
        return False
    return definer.__module__.partition(".")[0] == "torch"


def maybe_compiled_from(value: object) -> object | None:
    """The original of a module that `torch.compile` made, which forwards attributes to it."""
    cls = type(value)
    if (cls.__module__, cls.__qualname__) != _COMPILED_MODULE:  # without an import of dynamo
        return None
    inner: object | None = vars(value)["_modules"].get("_orig_mod")
    return inner


@functools.cache
def _maybe_function(line: str) -> Callable[..., object] | None:
    found = _maybe_fetch(line)
    return found if callable(found) and _stands_alone(line) else None


def _maybe_fetch(line: str) -> object | None:
    found: object | None = torch
    for part in line.replace(":", ".").split(".")[1:]:
        found = getattr(found, part, None)
    return found


def _stands_alone(line: str) -> bool:
    """Whether the line names a function that needs no reference to an object.

    Methods of tensors need none: a tensor can be sent as the first argument. Modules and optimizers
    cannot be sent, so their methods are called through a reference.
    """
    owner, _, method = line.rpartition(".")
    if ":" not in owner or owner == "torch:Tensor":
        return True
    raw = inspect.getattr_static(_maybe_fetch(owner), method)
    return isinstance(raw, staticmethod | classmethod)


@functools.cache
def methods() -> Mapping[type, set[str]]:
    """The methods that may be called on objects of exactly these classes."""
    found: dict[type, set[str]] = {}
    for line in classes():
        owner, _, method = line.rpartition(".")
        cls = _maybe_fetch(owner) if ":" in owner else None
        if isinstance(cls, type):
            found.setdefault(cls, set()).add(method)
    return found
