"""The names of functions and classes in messages: "module:qualname".

The caller names a function, and the callee decides in registry.py whether it may be called. Only
what no worker could look up by a name is refused here. This file resolves only names that it made
itself, never those of a peer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gradwire.errors import NotExposed
from gradwire.rpc.expose import torch_allowlist

Function = Callable[..., object]

_DEFINE_HINT = "define it with def at module level and expose it"
_STANDS_FOR = "__gradwire_name__"
VERSION = "@"
"""in a name, before the version of a function that was sent by value (launch/received.py)"""


def name_of(target: Function) -> str:
    """The name of a function or class; NotExposed if it does not lead back. hot: every call"""
    # The calls of a program are mostly of these two types, which need no further look.
    is_plain = type(target) is FunctionType
    if is_plain or type(target) is BuiltinFunctionType:
        listed = torch_allowlist.names().get(target)
    else:
        listed = torch_allowlist.maybe_name(target)
    if listed is not None:
        return listed
    if is_plain:
        name, home = _place_of(target.__module__, target.__qualname__)
        # What is inside of a class has a dot in its name, so it is not found here.
        if getattr(sys.modules.get(home), target.__qualname__, None) is target:
            return name
    elif torch_allowlist.is_compiled(target):
        raise NotExposed(
            f"torch's {target.__name__} is not on the list of torch functions that peers may call",
            hint="call it inside a function of yours, and expose that one",
        )
    name = _method_name(target) if isinstance(target, MethodType) else plain_name(target)
    path = steps(name)
    found = maybe_at(path)
    # Every access to a class method makes a new bound method: equal, never identical.
    if found is not target and not (isinstance(target, MethodType) and found == target):
        if getattr(target, "__dict__", {}).get(_STANDS_FOR) == name:
            return name
        raise _elsewhere(name, target, found)
    if is_instance_method(path):
        raise _needs_object(name, f"{name} is a method of objects")
    return name


def stand_for(target: object, name: str) -> None:
    """Let an earlier version of a function or class have this name, though it leads to a later."""
    setattr(target, _STANDS_FOR, name)


def unversioned(name: str) -> str:
    """The name without its version."""
    return name.partition(VERSION)[0]


def exception_name(kind: type[BaseException]) -> str:
    """The name of an exception's type; not every such name can be looked up again."""
    return torch_allowlist.maybe_name(kind) or label(kind)


def plain_name(target: object) -> str:
    """The name of where a function or class was defined; refused unless at module level."""
    home, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(home, str) or not isinstance(qualname, str):
        message = f"{described(target)} has no name to be called by"
        raise NotExposed(message, hint=_nameless_hint(target))
    return _place_of(home, qualname)[0]


@lru_cache(1 << 10)
def _place_of(home: str, qualname: str) -> tuple[str, str]:
    """The name of what is defined there, and its module; refused unless at module level."""
    home = one_main(home)
    name = f"{home}:{qualname}"
    if qualname.endswith("<lambda>"):
        message = f"{name} is a lambda, which has no name to be called by"
        raise NotExposed(message, hint=_DEFINE_HINT)
    if "<locals>" in qualname:
        raise NotExposed(f"{name} is local: no other worker could find it", hint=_DEFINE_HINT)
    return name, home


def one_main(home: str) -> str:
    """The module's name, with `__main__` for `__mp_main__`, as spawned workers call the script."""
    return "__main__" if home == "__mp_main__" else home


def is_of_main(target: Any) -> bool:  # noqa: ANN401
    """Whether `__main__` has this function or class under its own name."""
    is_defined_there = getattr(target, "__module__", None) == "__main__"
    return is_defined_there and vars(sys.modules["__main__"]).get(target.__qualname__) is target


def label(cls: type) -> str:
    """The name of a class, whether or not it leads back to it."""
    return f"{one_main(cls.__module__)}:{cls.__qualname__}"


def type_name(cls: type) -> str:
    """The same as errors show it."""
    return label(cls).replace(":", ".")


def steps(name: str) -> tuple[str, ...]:
    """The module and the attributes in a name that this file made."""
    home, _, qualname = name.partition(":")
    return (home, *qualname.split("."))


def maybe_at(path: tuple[str, ...]) -> object | None:
    """The object that a name made by this file stands for now."""
    found: object | None = sys.modules.get(path[0])
    for step in path[1:]:
        found = getattr(found, step, None)
    return found


def is_instance_method(path: tuple[str, ...]) -> bool:
    """Whether a name made by this file stands for a method that needs an object."""
    if len(path) == 2:
        return False
    owner = maybe_at(path[:-1])
    return isinstance(owner, type) and isinstance(vars(owner).get(path[-1]), FunctionType)


def described(value: object) -> str:
    """A value for an error text: its type, because its repr may be long or private."""
    return "nothing" if value is None else f"a {type(value).__name__} object"


def _method_name(method: MethodType) -> str:
    name = method.__name__
    if isinstance(method.__self__, type):
        return f"{plain_name(method.__self__)}.{name}"
    owner = label(type(method.__self__))
    raise _needs_object(name, f"{owner}.{name} is bound to an object, which cannot be serialized")


def _elsewhere(name: str, target: object, found: object) -> NotExposed:
    """The error for a function that has the name of another, as a wrapper of it does."""
    function = name.rpartition(".")[2].rpartition(":")[2]
    inner = getattr(target, "_torchdynamo_orig_callable", getattr(target, "__wrapped__", None))
    if inner is not None and inner is found:
        compiled = hasattr(target, "_torchdynamo_orig_callable")
        how = "torch.compile" if compiled else "your decorator"
        return NotExposed(
            f"{name} is the original function here, not the one that {how} made of it",
            hint=f"give both one name, as in `{function} = {how.split()[-1]}({function})` or "
            "@… above its def; or call it inside a function of yours",
        )
    return NotExposed(
        f"{name} leads to {described(found)} here, not to the function given",
        hint="give it a module-level name of its own",
    )


def _nameless_hint(target: object) -> str:
    if isinstance(target, nn.Module):
        return (
            "make it where it runs with gradwire.RemoteModule, or keep it there and call it "
            "through a reference: rref.rpc_sync().forward(...)"
        )
    if isinstance(target, partial):
        return "pass the function itself, and all of its arguments in args and kwargs"
    if isinstance(target, torch.jit.ScriptFunction):
        return "call it inside a function of yours that is defined at module level, and expose that"
    return _DEFINE_HINT


def _needs_object(name: str, message: str) -> NotExposed:
    method = name.rpartition(".")[2]
    hint = f"use rref.rpc_sync().{method}(...) on a reference to the object"
    return NotExposed(message, hint=hint)
