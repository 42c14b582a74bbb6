"""What calls are named in a profile: on the worker that makes one, and on the one that runs it.

The names are those of torch.distributed.rpc, so that its users find what they know. The range of
`rpc_async` and `remote` ends when the call is on its way.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from gradwire.autograd.profiling import NOTHING, span
from gradwire.torch_private import is_profiled


def call_span(kind: str, function: str, caller: str, callee: str) -> AbstractContextManager[Any]:
    """Around a call, where it is made."""
    return span("rpc_%s#%s(%s -> %s)", kind, plain(function), caller, callee)


def fetch_span(caller: str, owner: str) -> AbstractContextManager[Any]:
    """Around the fetching of a value."""
    return span("to_here#(%s)->(%s)", caller, owner)


def function_span(function: str) -> AbstractContextManager[Any]:
    """Around a function, where it runs."""
    return span("%s", plain(function)) if is_profiled() else NOTHING


def plain(function: str) -> str:
    """A travelling name without its module."""
    return function.rpartition(":")[2].lstrip(".!")
