"""How often calls have ended in each way, by the other worker."""

from __future__ import annotations

from typing import final

from gradwire.ids import WorkerId

Tally = dict[WorkerId, int]


@final
class Ends:
    """The ends of calls that one worker makes, or of those that it serves.

    Each call is added once, to one of these: see `PeerLimit.uncount` and `one_more`.
    """

    __slots__ = ("answered", "cancelled", "late", "lost", "raised", "unsent")

    def __init__(self) -> None:
        self.answered: Tally = {}  # with what the function returned
        self.raised: Tally = {}  # the function, or the worker that refused to run it
        self.late: Tally = {}  # the deadline passed first
        self.cancelled: Tally = {}  # nobody waited any more
        self.lost: Tally = {}  # the connection, or this worker, ended first
        self.unsent: Tally = {}  # the message could not leave

    def seen(self) -> dict[str, Tally]:
        """A copy, by way."""
        return {way: getattr(self, way).copy() for way in self.__slots__}
