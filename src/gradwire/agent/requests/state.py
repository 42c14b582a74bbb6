"""Requests in flight: which wait for an answer, on which channel, until when.

Rules of this file:
  1. Pure. No threads, no clock: time is an argument. Slots and channels are carried, never touched.
  2. A request leaves the table exactly once: answered, late, lost or withdrawn. Whoever took it out
     settles it; a second answer finds nothing, which is not an error (the deadline passed while
     it travelled).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, final

from gradwire.errors import BadMessage
from gradwire.ids import WorkerId


@dataclass(slots=True, eq=False)
class Pending:
    """One request without an answer. `slot` is whatever the driver wants back with it."""

    peer: WorkerId
    what: str
    opened: float
    deadline: float
    slot: Any
    phase: str = "call"
    inbound: object = None
    """what it is made for: a request of a peer's that is being served here"""
    tells: bool = False
    """whether the peer shall hear if nobody waits for the answer any more"""
    via: object = None
    """the channel that it goes over, once that is known: if it ends, so does the request"""


class Taken(NamedTuple):
    """A request that has left the table, and the channel it went over, if it did."""

    n: int
    pending: Pending
    via: object


@final
class CallTable:
    """The requests of one worker."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def opened(self, pending: Pending) -> int:
        """A request is about to leave; its number."""
        n = next(self._numbers)
        self._pending[n] = pending
        return n

    def left(self, n: int, channel: object) -> None:
        """It goes over this channel, which had to be made first."""
        pending = self._pending.get(n)
        if pending is not None:
            pending.via = channel

    def answered(self, n: int, by: WorkerId | None = None) -> Pending | None:
        """The request that this answers, or None if nobody waits for it any more.

        `by` is who answers: anyone else than who was asked is refused.
        """
        pending = self._pending.get(n)
        if pending is None:
            return None
        if by is not None and by != pending.peer:
            raise BadMessage(f"w{by} answers request {n}, which it was not asked")
        return self._pending.pop(n, None)  # of two that are told of it, one gets it

    def passed(self, now: float) -> list[Taken]:
        """The requests whose deadline is over; they are no longer in the table."""
        return self._taken([n for n, p in self._pending.copy().items() if p.deadline <= now])

    def channel_lost(self, channel: object) -> list[Taken]:
        """The requests that went over this channel; they are no longer in the table."""
        return self._taken([n for n, p in self._pending.copy().items() if p.via is channel])

    def withdrawn(self, slot: object) -> list[Taken]:
        """The request with this slot, if it waits; it is no longer in the table."""
        return self._taken([n for n, p in self._pending.copy().items() if p.slot is slot])

    def made_for(self, inbound: object) -> list[Taken]:
        """The requests that were made for this one of a peer's; no longer in the table."""
        return self._taken([n for n, p in self._pending.copy().items() if p.inbound is inbound])

    def closed(self) -> list[Taken]:
        """All of them, because this worker stops."""
        return self._taken(list(self._pending))

    def next_deadline(self) -> float | None:
        """When `passed` should be asked next."""
        return min((p.deadline for p in self._pending.copy().values()), default=None)

    def _taken(self, numbers: list[int]) -> list[Taken]:
        taken = [(n, self._pending.pop(n, None)) for n in numbers]
        return [Taken(n, pending, pending.via) for n, pending in taken if pending is not None]
