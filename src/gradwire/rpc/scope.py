"""What travels with a call besides its arguments, and is set around the function it runs.

The deadline: a nested call never outlives the call it is made in. It ends a little before, so that
whoever waits for both hears which worker was late, and does not blame the one in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar, Token

from gradwire.agent.errands import Source
from gradwire.errors import CallTimeout, Cancelled, UsageError

_SHARE = 10
_MOST_SECONDS = 0.5
"""How much earlier: this part of the time that is left, and at most this."""

Due = tuple[float, Source | None, object]
"""By when a function must be over, whose request it serves, and for which run of a checkpoint's
function (sessions.py), if any.
"""

_due: ContextVar[Due] = ContextVar("gradwire deadline", default=(math.inf, None, None))


def is_due(deadline: float, errand: Source | None) -> Token[Due]:
    """This code must be over by then, or when its errand is called off, until `was_due`."""
    outer, its_errand, session = _due.get()
    if outer < deadline:
        deadline = outer
    if errand is None:
        return _due.set((deadline, its_errand, session))
    return _due.set((deadline, errand, None))


was_due: Callable[[Token[Due]], None] = _due.reset
"""as it was before"""


def current_errand() -> Source | None:
    """The request of a peer's that this code serves."""
    return _due.get()[1]


class repeating:
    """Code that runs for a checkpoint; sessions.py says which."""

    @staticmethod
    def current() -> object:
        """The run that this code is a part of."""
        return _due.get()[2]

    @staticmethod
    def enter(session: object) -> Token[Due]:
        """This code is a part of that run, until `was_due`."""
        deadline, errand, _ = _due.get()
        return _due.set((deadline, errand, session))


def deadline_from(timeout: float | None, default: float, now: float) -> float:
    """The moment a wait ends: what was asked for, but not after what encloses it.

    CallTimeout if that is over, Cancelled if nobody waits any more for what this code is run for.
    """
    seconds = default if timeout is None else timeout
    if not 0 < seconds < math.inf:
        raise UsageError(f"timeout={timeout!r} is not a positive, finite number of seconds")
    due, errand, _ = _due.get()
    if errand is not None and errand.cancelled:
        raise Cancelled(f"the call that this one is made in was called off: {errand.cancelled}")
    if due <= now:
        raise CallTimeout("the call that this one is made in is past its own deadline")
    left = due - now
    return now + min(seconds, left - min(left / _SHARE, _MOST_SECONDS))
