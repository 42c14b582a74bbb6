"""The methods of a value that lives elsewhere, called through its reference."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradwire.compat.rpc import api
from gradwire.compat.rpc.constants import UNSET_RPC_TIMEOUT
from gradwire.compat.rpc.references import PyRRef
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.expose.async_execution import result_of

_SCRIPTED = (torch.jit.ScriptModule, torch._C.ScriptModule)


class RRefProxy:
    """What `rref.rpc_sync()`, `rref.rpc_async()` and `rref.remote()` return."""

    def __init__(
        self, rref: PyRRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        self.rref, self.rpc_api, self.rpc_timeout = rref, rpc_api, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self.rref, self.rpc_api, name, self.rpc_timeout)


def _invoke(
    rref: PyRRef[Any],
    rpc_api: Callable[..., Any],
    name: str,
    timeout: float,
    *args: object,
    **kwargs: object,
) -> Any:  # noqa: ANN401
    """Call a method, once the value is known to have it."""

    def call(kind: Any) -> Any:  # noqa: ANN401
        _check(rref, kind.value(), name, timeout)
        return rpc_api(rref.owner(), call_method, (rref, name, args, kwargs), timeout=timeout)

    known = rref._get_type(timeout=timeout, blocking=False)
    if rpc_api.__name__ == "rpc_async" and isinstance(known, Future) and not known.done():
        here = contextvars.copy_context()  # not where the type was first asked for
        return known.follow(lambda kind: here.run(call, kind))
    known.wait()
    return call(known)


def _check(rref: PyRRef[Any], kind: type, name: str, timeout: float) -> None:
    """Raise here what Python would say if the value had no such method.

    Mostly its type tells. If not, its owner is asked: a method may stand on the object itself, or
    come from its `__getattr__`, as those of TorchScript and of compiled modules do.
    """
    if hasattr(kind, name) or issubclass(kind, _SCRIPTED):
        return
    if not api.rpc_sync(rref.owner(), _has_attribute, (rref, name), timeout=timeout):
        raise AttributeError(f"type object {kind.__name__!r} has no attribute {name!r}")


def _has_attribute(rref: PyRRef[Any], name: str) -> bool:
    return hasattr(rref.local_value(), name)


def call_method(rref: PyRRef[Any], name: str, args: Any, kwargs: Any) -> object:  # noqa: ANN401
    """Runs on the owner."""
    return result_of(getattr(rref.local_value(), name), *args, **kwargs)
