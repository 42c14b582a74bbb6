"""What does not travel, and what to do instead: texts for kinds that users try first.

Advice must be such that it can be followed: a generator has no codec, and a module could be
pickled but should mostly stay where it is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import (
    AsyncGenerator,
    Coroutine,
    Generator,
    ItemsView,
    Iterator,
    KeysView,
    ValuesView,
)
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from gradwire.errors import NotSerializable

_FUTURES = (torch._C.Future, concurrent.futures.Future, asyncio.Future)
_LISTED = (Iterator, KeysView, ItemsView, ValuesView)
MODULE_HINT = (
    "make it where it runs with gradwire.RemoteModule, keep it there behind a reference "
    "(gradwire.remote), or send its state_dict()"
)


class _Refusal(NamedTuple):
    what: str
    hint: str


def maybe_refusal(kind: type) -> NotSerializable | None:
    """The error for a kind that travels in no way, pickles included; None for any other."""
    found = _maybe_found(kind)
    if found is None:
        return None
    return NotSerializable(f"{found.what} does not travel", hint=found.hint)


def _maybe_found(kind: type) -> _Refusal | None:
    if issubclass(kind, Coroutine):
        return _Refusal(
            "the coroutine of an `async def` function",
            "declare the function with def; one that answers later is decorated with "
            "@gradwire.async_execution and returns a future",
        )
    if issubclass(kind, Generator | AsyncGenerator):
        return _Refusal("a generator", "return or send a list of what it yields")
    if issubclass(kind, _FUTURES):
        return _Refusal(
            "a future",
            "send what it brings, as future.wait() returns it; a function that returns a "
            "torch or gradwire future is decorated with @gradwire.async_execution",
        )
    if issubclass(kind, _LISTED):
        return _Refusal(f"a {kind.__name__}", "send a list of what it yields, list(...)")
    return None


def maybe_hint(kind: type) -> str | None:
    """What to do with a value of a kind that travels as a pickle at most."""
    if issubclass(kind, nn.Module):
        return MODULE_HINT
    if issubclass(kind, torch.Tensor) and hasattr(kind, "full_tensor"):
        return "a DTensor is spread over a mesh: send its full_tensor(), or its to_local()"
    return None


def refuse(refusal: NotSerializable, value: object) -> NoReturn:
    """Raise it; a coroutine that nobody will await is closed, or Python would warn of it."""
    if isinstance(value, Coroutine):
        value.close()
    raise refusal
