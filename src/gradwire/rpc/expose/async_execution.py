"""async_execution: marks functions that return a future, whose value is the result of the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from gradwire.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

LATER = "_wrapped_async_rpc_function"
"""the attribute that `async_execution` leaves on a function"""


def async_execution(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function return a future; its caller gets the value of the future.

    No thread waits for the future. Put it below @staticmethod and @classmethod.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    setattr(wrapper, LATER, function)
    return wrapper


class Later(NamedTuple):
    """A result that a future will have."""

    future: torch.futures.Future[Any]
    note: Callable[[BaseException | None], bytes] | None = None
    """the note of the answer, for the error of the future or None; may raise another error"""
    finish: Callable[[Any], object] | None = None
    """makes the result of the value of the future"""


def result_of(function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> object:
    """What the function returns, or Later if it is marked with `async_execution`."""
    value = function(*args, **kwargs)
    return later_of(function, value) if hasattr(function, LATER) else value


def later_of(function: Callable[..., object], value: object) -> Later:
    """The future that a function marked with `async_execution` returned, as Later."""
    if isinstance(value, torch._C.Future):
        return Later(value)  # type: ignore[arg-type]
    kind = type(value)
    name = getattr(function, "__qualname__", repr(function))
    raise UsageError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
        f"but got {kind.__module__}.{kind.__qualname__}",
        hint=f"return the future itself from {name}, not its value",
    )
