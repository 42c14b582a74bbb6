"""What travels with a call besides its arguments, and is set around the function it runs.

The deadline: a nested call never outlives the call it is made in. It ends a little before; see Note
[Deadlines of nested calls], agent/requests/timer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar, Token

from gradwire.agent.requests.timer import nested
from gradwire.agent.serving.dispatch import Source
from gradwire.errors import CallTimeout, Cancelled, UsageError
from gradwire.options import DEFAULT, FOREVER, Timeout

Due = tuple[float, Source | None, object]
"""By when a function must be over, whose request it serves, and for which run of a checkpoint's
function (recompute/checkpoint_run.py), if any.
"""

_due: ContextVar[Due] = ContextVar("gradwire deadline", default=(math.inf, None, None))


def is_due(deadline: float, inbound: Source | None) -> Token[Due]:
    """Set the deadline of this code and the request that it serves, until `was_due`."""
    outer, its_inbound, session = _due.get()
    if outer < deadline:
        deadline = outer
    if inbound is None:
        return _due.set((deadline, its_inbound, session))
    return _due.set((deadline, inbound, None))


was_due: Callable[[Token[Due]], None] = _due.reset
"""as it was before"""


current_due: Callable[[], Due] = _due.get
"""All of it at once. hot: each call, so it is no function of Python's"""


def current_inbound() -> Source | None:
    """The request of a peer's that this code serves."""
    return _due.get()[1]


def current_deadline() -> float:
    """The moment by which this code must be over."""
    return _due.get()[0]


def current_run() -> object:
    """The run of a checkpoint's function that this code is in; see recompute/checkpoint_run.py.

    hot: each call
    """
    return _due.get()[2]


def enter_run(session: object) -> Token[Due]:
    """This code is a part of that run, until `was_due`."""
    deadline, inbound, _ = _due.get()
    return _due.set((deadline, inbound, session))


def deadline_from(timeout: Timeout, default: float, now: float) -> float:
    """The moment a wait ends: what was asked for, but not after what encloses it.

    CallTimeout if that is over, Cancelled if nobody waits any more for what this code is run for.
    """
    if timeout is DEFAULT:
        seconds = default
    else:
        seconds = FOREVER if timeout is None else min(timeout, FOREVER)
        if not seconds > 0:
            raise UsageError(
                f"timeout={timeout!r} is not a positive number of seconds",
                hint="timeout=None waits as long as the other worker lives",
            )
    due, inbound, _ = _due.get()
    if inbound is not None and inbound.cancelled:
        raise Cancelled(f"the call that this one is made in was called off: {inbound.cancelled}")
    if due <= now:
        raise CallTimeout("the call that this one is made in is past its own deadline")
    return now + seconds if due == math.inf else nested(due, now, seconds)
