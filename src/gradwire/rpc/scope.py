"""What travels with a call besides its arguments, and is set around the function it runs.

The deadline: a nested call never outlives the call it is made in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gradwire.errors import CallTimeout, UsageError

_deadline: ContextVar[float] = ContextVar("gradwire deadline", default=math.inf)


@contextmanager
def due(deadline: float) -> Iterator[None]:
    """The block must be over by then."""
    token = _deadline.set(min(deadline, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


def deadline_from(timeout: float | None, default: float, now: float) -> float:
    """The moment a wait ends: what was asked for, but not after what encloses it."""
    seconds = default if timeout is None else timeout
    if not 0 < seconds < math.inf:
        raise UsageError(f"timeout={timeout!r} is not a positive, finite number of seconds")
    if _deadline.get() <= now:
        raise CallTimeout("the call that this one is made in is past its own deadline")
    return min(now + seconds, _deadline.get())
