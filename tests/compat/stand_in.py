"""The parts of compat that these tests need and that do not stand beside them yet."""

from __future__ import annotations

import importlib
import sys
import types

import gradwire
from gradwire.compat.rpc import world


def _missing(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return True
    return False


def _add(name, **names):
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module


if _missing("gradwire.compat.rpc.api"):
    for function in (world._to_leader_here, world._to_follower_here):
        gradwire.expose(function)
    offered = {name: getattr(world, name) for name in world.__all__}
    _add(
        "gradwire.compat.rpc.api",
        **offered,
        rpc_sync=gradwire.rpc_sync,
        rpc_async=gradwire.rpc_async,
        remote=gradwire.remote,
        _ignore_rref_leak=True,
    )
if _missing("gradwire.compat.autograd"):
    _add("gradwire.compat.autograd", _init=lambda rank: None)

api = importlib.import_module("gradwire.compat.rpc.api")
