"""How far the clock of another machine is ahead of ours. Pure.

Workers of one machine share its clock: the offset is 0, exactly. Else several small requests are
answered with the time there; the quickest bounds the offset best. It lies within half of that round
trip of the estimate, whatever the two ways take. Clocks of machines also run apart, so a second
round at the end of a trace gives the drift in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Reading(NamedTuple):
    """A request that left at `sent`, was answered with `there`, and the answer came at `came`."""

    sent: float
    there: float
    came: float


class Offset(NamedTuple):
    """What to add to a time there to get the time here, and by how much it may be wrong."""

    seconds: float = 0.0
    uncertainty: float = 0.0
    at: float = 0.0


class Offsets(NamedTuple):
    """The offset of one clock at the beginning and at the end of a trace."""

    first: Offset = Offset()
    last: Offset = Offset()

    @property
    def uncertainty(self) -> float:
        """By how much a time may be wrong."""
        return max(self.first.uncertainty, self.last.uncertainty)

    def here(self, there: float) -> float:
        """The time here at which the clock there shows this; in between the drift is even."""
        first, last = self.first, self.last
        if first.seconds == last.seconds or last.at <= first.at:
            return there + first.seconds
        began, ended = first.at - first.seconds, last.at - last.seconds
        share = (there - began) / (ended - began)
        return there + first.seconds + share * (last.seconds - first.seconds)


SAME_CLOCK = Offsets()


def estimate(readings: Sequence[Reading]) -> Offset:
    """The offset by the quickest of these.

    >>> estimate([Reading(0.0, 5.0, 4.0), Reading(10.0, 14.0, 12.0)])
    Offset(seconds=-3.0, uncertainty=1.0, at=11.0)
    """
    best = min(readings, key=lambda reading: reading.came - reading.sent)
    half = (best.came - best.sent) / 2
    return Offset(best.sent + half - best.there, half, best.sent + half)
