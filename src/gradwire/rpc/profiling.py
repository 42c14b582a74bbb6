"""The names of calls in a profile: those of torch.distributed.rpc, which its users know.

The range of `rpc_async` and `remote` ends when the call is on its way.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from gradwire.rpc.expose.names import unversioned
from gradwire.torch_private import span


def call_name(kind: str, function: str, caller: str, callee: str) -> str:
    """Of a call, on the caller."""
    return f"rpc_{kind}#{plain(function)}({caller} -> {callee})"


def fetch_span(caller: str, owner: str) -> AbstractContextManager[Any]:
    """Around fetching the value of a reference."""
    return span("to_here#(%s)->(%s)", caller, owner)


def function_span(function: str) -> AbstractContextManager[Any]:
    """Around a function, on the callee."""
    return span("%s", plain(function))


def plain(function: str) -> str:
    """The name of an exposed function without its module, or of one that comes with its call."""
    function = unversioned(function)
    return function[1:] if function.startswith("!") else function.rpartition(":")[2].lstrip(".")
