"""Names for the things that cross: types that print as they are spoken, in logs, errors and traces.

A worker is known by its number (its rank) on the wire and by its name to people. Every other id is
a pair: who made it, and that worker's count. Contexts are plain ints, as in torch: the worker's
number in the top 16 bits, its count in the lower 48.
"""

from __future__ import annotations

import msgspec

ContextId = int
WorkerId = int

LAST_WORKER = (1 << 15) - 1
"""Numbers of workers fit into the top bits of a context's id, which is a positive 64-bit number."""
_CONTEXT_SHIFT = 48
_LIFE_SHIFT = 32
LAST_LIFE = (1 << _CONTEXT_SHIFT - _LIFE_SHIFT) - 1
"""Lives fit into the upper part of a context's count."""


class _Counted(msgspec.Struct, frozen=True, order=True, array_like=True):
    worker: WorkerId
    n: int


class CallId(_Counted, frozen=True, order=True, array_like=True):
    """One request that wants an answer."""

    def __str__(self) -> str:
        return f"w{self.worker}#{self.n}"


class EdgeId(_Counted, frozen=True, order=True, array_like=True):
    """One crossing of the graph from a worker to another, numbered by the worker it left."""

    def __str__(self) -> str:
        return f"e{self.worker}.{self.n}"


class PassId(_Counted, frozen=True, order=True, array_like=True):
    """One backward over a context, numbered by the worker that started it."""

    def __str__(self) -> str:
        return f"p{self.worker}.{self.n}"


class RefId(_Counted, frozen=True, order=True, array_like=True):
    """One value that references point to."""

    def __str__(self) -> str:
        return f"r{self.worker}.{self.n}"


class ForkId(_Counted, frozen=True, order=True, array_like=True):
    """One copy of a reference, in the hands of one worker."""

    def __str__(self) -> str:
        return f"f{self.worker}.{self.n}"


def first_of(life: int) -> int:
    """Where a worker begins to count: above all that its number was used for in earlier lives."""
    return life << _LIFE_SHIFT


def context_id(worker: WorkerId, n: int) -> ContextId:
    """The id of a worker's n-th context."""
    return worker << _CONTEXT_SHIFT | n


def last_context_id(worker: WorkerId) -> ContextId:
    """The greatest id that a context of this worker can have."""
    return context_id(worker, (1 << _CONTEXT_SHIFT) - 1)


def opener_of(context: ContextId) -> WorkerId:
    """The worker that opened a context."""
    return context >> _CONTEXT_SHIFT


def count_of(context: ContextId) -> int:
    """Which of its opener's contexts it is."""
    return context & ((1 << _CONTEXT_SHIFT) - 1)


def spoken_context(context: ContextId) -> str:
    """How a context is written in errors and traces: c<worker>.<n>."""
    return f"c{opener_of(context)}.{count_of(context)}"
