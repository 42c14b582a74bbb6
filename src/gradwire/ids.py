"""Ids of workers, calls, edges, passes, references, steps and contexts, and how they are printed.

A worker is identified by its number (its rank) on the wire and by its name in texts. Every other id
is a pair: the worker that made it, and a counter of that worker. Contexts are plain ints, as in
torch: the worker's number in the top 16 bits, its counter in the lower 48.
"""

from __future__ import annotations

import re

import msgspec

ContextId = int
WorkerId = int

WORKER_NAME = re.compile(r"[A-Za-z0-9\-_:]{1,127}")
"""The whole of a worker's name, as torch allows it."""
LAST_WORKER = (1 << 15) - 1
"""The greatest number that fits into the top bits of a context's id, a positive 64-bit integer."""
_CONTEXT_SHIFT = 48
_INCARNATION_SHIFT = 32
LAST_INCARNATION = (1 << _CONTEXT_SHIFT - _INCARNATION_SHIFT) - 1
"""The greatest incarnation that fits into the upper part of a context's counter."""


class _Counted(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Printed as the first letter of its kind, its worker and its number: e1.0 is an EdgeId."""

    worker: WorkerId
    n: int

    def __str__(self) -> str:
        return f"{type(self).__name__[0].lower()}{self.worker}.{self.n}"


class CallId(_Counted, frozen=True, order=True, array_like=True):
    """One request that expects an answer."""

    def __str__(self) -> str:
        return f"w{self.worker}#{self.n}"


class EdgeId(_Counted, frozen=True, order=True, array_like=True):
    """One edge of the graph from a worker to another, numbered by the sender."""


class PassId(_Counted, frozen=True, order=True, array_like=True):
    """One backward pass, numbered by the worker that started it."""


class RefId(_Counted, frozen=True, order=True, array_like=True):
    """One value that references point to."""


class ForkId(_Counted, frozen=True, order=True, array_like=True):
    """One copy of a reference, held by one worker."""


class StepId(_Counted, frozen=True, order=True, array_like=True):
    """One step of an optimizer, numbered by the worker that asked for it."""


def first_of(incarnation: int) -> int:
    """The first value of a worker's counters: above those of its earlier incarnations."""
    return incarnation << _INCARNATION_SHIFT


def context_id(worker: WorkerId, n: int) -> ContextId:
    """The id of a worker's n-th context."""
    return worker << _CONTEXT_SHIFT | n


def opener_of(context: ContextId) -> WorkerId:
    """The worker that opened a context."""
    return context >> _CONTEXT_SHIFT


def count_of(context: ContextId) -> int:
    """The counter of a context's id."""
    return context & ((1 << _CONTEXT_SHIFT) - 1)


def spoken_context(context: ContextId) -> str:
    """How a context is written in errors and traces: c<worker>.<n>."""
    return f"c{opener_of(context)}.{count_of(context)}"
