"""What travels with a call besides its arguments, and is set around the function it runs.

The deadline: a nested call never outlives the call it is made in.
"""

from __future__ import annotations

import math
from contextvars import ContextVar, Token

from gradwire.errors import CallTimeout, UsageError

_deadline: ContextVar[float] = ContextVar("gradwire deadline", default=math.inf)


def is_due(deadline: float) -> Token[float]:
    """This code must be over by then, until `was_due`."""
    return _deadline.set(min(deadline, _deadline.get()))


def was_due(token: Token[float]) -> None:
    """As it was before."""
    _deadline.reset(token)


def deadline_from(timeout: float | None, default: float, now: float) -> float:
    """The moment a wait ends: what was asked for, but not after what encloses it."""
    seconds = default if timeout is None else timeout
    if not 0 < seconds < math.inf:
        raise UsageError(f"timeout={timeout!r} is not a positive, finite number of seconds")
    if _deadline.get() <= now:
        raise CallTimeout("the call that this one is made in is past its own deadline")
    return min(now + seconds, _deadline.get())
