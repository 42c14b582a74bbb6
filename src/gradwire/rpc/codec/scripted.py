"""TorchScript functions and modules in a pickle, as torch.distributed.rpc sends them.

A function goes by its name: TorchScript of that name must be compiled on the other worker, too, so
its module is imported there if need be. A module goes as the archive that torch saves it as, with
copies of its parameters. Only pickle_codec.py may use this: what it makes is loaded from a peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch._C import ScriptFunction
from torch.jit import ScriptModule

from gradwire.rpc.expose.async_execution import LATER, async_execution

_ROOT = "__torch__."

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def maybe_reduced(value: object) -> Reduced | None:
    """How to pickle it, if it is TorchScript, or such a function marked `async_execution`."""
    if isinstance(value, ScriptFunction):
        return function_named, (value.qualified_name,)
    if isinstance(value, ScriptModule):
        return module_from, (value.save_to_buffer(),)
    marked = getattr(value, LATER, None) if isinstance(value, FunctionType) else None
    return (async_execution, (marked,)) if isinstance(marked, ScriptFunction) else None


def function_named(name: str) -> Any:  # noqa: ANN401
    """The scripted function of that name; AttributeError if this process has none."""
    unit = torch.jit._state._python_cu
    found = unit.find_function(name)
    if found is None:
        home = name.removeprefix(_ROOT).rpartition(".")[0]
        with suppress(ImportError, ValueError):
            importlib.import_module(home)
        found = unit.find_function(name)
    if found is None:
        raise AttributeError(f"no TorchScript function {name.removeprefix(_ROOT)} is compiled here")
    return found


def module_from(data: bytes) -> ScriptModule:
    """The module of an archive. Not by torch.jit.load, which says that it is deprecated."""
    load: Any = torch._C.import_ir_module_from_buffer
    wrap: Any = torch.jit._recursive.wrap_cpp_module
    module: ScriptModule = wrap(load(torch._C.CompilationUnit(), data, None, {}, False))
    return module
