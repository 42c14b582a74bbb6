"""When a nested wait ends: before the wait that encloses it, but as little before as will do.

Pure. See Note [Deadlines of nested calls].
"""

from __future__ import annotations

import math
from typing import Self, final

from gradwire.options import FOREVER

_SHARE = 10
_MOST_SECONDS = 3.0
OUTERMOST = (0, 0.0)
_LEVELS = 300
"""Note [Deadlines of nested calls]: the deadline of the outermost call is what counts. A call that
is made inside ends a little earlier than the one around it, so that its error, which names the
worker that is late, is there before the one around it would blame the worker in between. All levels
together take a tenth of the time, and at most three seconds. The first take most of it, for few
calls go deeper; of the rest, each of 300 levels has its part, and those below have none.
"""


@final
class Cut(float):
    """A deadline that an enclosing call has set, earlier than was asked for."""

    __slots__ = ("asked", "depth", "room")

    depth: int
    """how many calls with this deadline, or one derived from it, are around"""
    room: float
    """the seconds that all levels share"""
    asked: float
    """the seconds that were asked for"""

    def __new__(cls, moment: float, depth: int, room: float, asked: float) -> Self:
        """It is a moment, and knows why."""
        cut = super().__new__(cls, moment)
        cut.depth, cut.room, cut.asked = depth, room, asked
        return cut


def nested(due: float, now: float, seconds: float) -> float:
    """The end of a wait for so many seconds, inside of one that ends at `due`."""
    left = due - now
    if type(due) is Cut:
        depth, room = due.depth, min(max(due.room, 0.0), left)  # as a peer has told us
    else:
        depth, room = 0, min(left / _SHARE, _MOST_SECONDS)
    limit = max(due - room * (_taken(depth + 1) - _taken(depth)), now + left / 2)
    return now + seconds if now + seconds <= limit else Cut(limit, depth + 1, room, seconds)


def _taken(depth: int) -> float:
    """The part of the room that so many levels take."""
    return 0.5 * (1 - 0.7 ** min(depth, _LEVELS)) + 0.5 * math.sqrt(min(depth / _LEVELS, 1.0))


def extent_of(deadline: float) -> tuple[int, float]:
    """The depth and the room of a deadline, which travel with a call. hot: every call"""
    return (deadline.depth, deadline.room) if type(deadline) is Cut else OUTERMOST


def spoken(deadline: float) -> str:
    """What an error adds about a deadline that is not the one that was asked for."""
    if type(deadline) is not Cut:
        return ""
    asked = f"{deadline.asked:g} s were" if deadline.asked < FOREVER else "no deadline was"
    return f", all that the call around it had left ({asked} asked for)"
