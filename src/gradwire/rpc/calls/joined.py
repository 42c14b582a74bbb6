"""future_of_all: one future of several calls, made by `rpc_async` to several workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gradwire.agent.requests.promise import Promise
from gradwire.rpc.calls.futures import Future, PendingResult
from gradwire.rpc.codec.body import DecodedBody

T = TypeVar("T")


def future_of_all(
    parts: Sequence[Future[Any]], joined: Callable[[list[Any]], list[Any]], what: str
) -> Future[list[Any]]:
    """The future of several calls: of what `joined` makes of their values and exceptions."""
    promise: Promise[None] = Promise()
    pendings, left = [part._pending for part in parts], deque(parts)

    def unpack(_: None) -> DecodedBody:
        return DecodedBody(joined(list(map(_value_or_error, pendings))), handoff=hand_over)

    def hand_over() -> None:  # each thread that takes the values goes above the depth of each
        for pending in pendings:
            pending.value()

    def part_settled(_: object) -> None:
        left.pop()
        if not left:
            promise.settle(None)

    for part in parts:
        part._promise.on_settled(part_settled)
    pending: PendingResult[list[Any]] = PendingResult(promise, unpack, lambda: what)
    return Future(pending, parts[0]._environment, None, parts)


def _value_or_error(pending: PendingResult[T]) -> T | Exception:
    """The value, or the exception in its place, without its frames."""
    try:
        return pending.value()
    except Exception as error:
        return error.with_traceback(None)
