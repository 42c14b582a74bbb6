"""The table of requests in flight: which wait for an answer, on which channel, until when.

Rules of this file:
  1. Pure. No threads, no clock: time is an argument. Slots and channels are stored, never used.
  2. A request leaves the table exactly once: answered, late, lost or withdrawn. The caller that
     took it out settles it. A second answer finds nothing, which is not an error (the deadline
     passed while it travelled).
  3. No lock, see Note [One step of the interpreter]: `dict.pop` gives a request to one of two
     threads, and a scan works on a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, final

from gradwire.errors import BadMessage
from gradwire.ids import WorkerId


@dataclass(slots=True, eq=False)
class Pending:
    """One request without an answer. `slot` is what the driver wants back with it."""

    peer: WorkerId
    description: str
    opened: float
    deadline: float
    slot: Any
    phase: str = "call"
    inbound: object = None
    """the request of a peer that it is made for, which is being served here"""
    notify_cancel: bool = False
    """whether to send the peer a Cancel if nobody waits for the answer any more"""
    via: object = None
    """the channel it is sent on, once known: if the channel ends, the request fails"""


class Taken(NamedTuple):
    """A request that has left the table, and the channel it was sent on, if it was."""

    n: int
    pending: Pending
    via: object


@final
class RequestTable:
    """The requests of one worker that have no answer yet."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def opened(self, pending: Pending) -> int:
        """Add a request that is about to be sent; its number."""
        n = next(self._numbers)
        self._pending[n] = pending
        return n

    def left(self, n: int, channel: object) -> None:
        """Record the channel of a request, which had to be opened first."""
        pending = self._pending.get(n)
        if pending is not None:
            pending.via = channel

    def answered(self, n: int, by: WorkerId | None = None) -> Pending | None:
        """Take out the request that this answers; None if nobody waits for it any more.

        `by` is the worker that answers: BadMessage unless it is the one that was asked.
        """
        pending = self._pending.get(n)
        if pending is None:
            return None
        if by is not None and by != pending.peer:
            raise BadMessage(f"w{by} answers request {n}, which it was not asked")
        return self._pending.pop(n, None)  # of two callers, one gets it

    def passed(self, now: float) -> list[Taken]:
        """Take out the requests whose deadline is over."""
        return self._taken([n for n, p in self._pending.copy().items() if p.deadline <= now])

    def channel_lost(self, channel: object) -> list[Taken]:
        """Take out the requests that were sent on this channel."""
        return self._taken([n for n, p in self._pending.copy().items() if p.via is channel])

    def withdrawn(self, slot: object) -> list[Taken]:
        """Take out the request with this slot, if it is there."""
        return self._taken([n for n, p in self._pending.copy().items() if p.slot is slot])

    def made_for(self, inbound: object) -> list[Taken]:
        """Take out the requests that were made while serving this request of a peer."""
        return self._taken([n for n, p in self._pending.copy().items() if p.inbound is inbound])

    def closed(self) -> list[Taken]:
        """Take out all of them, because this worker stops."""
        return self._taken(list(self._pending))

    def next_deadline(self) -> float | None:
        """When to call `passed` next."""
        return min((p.deadline for p in self._pending.copy().values()), default=None)

    def _taken(self, numbers: list[int]) -> list[Taken]:
        taken = [(n, self._pending.pop(n, None)) for n in numbers]
        return [Taken(n, pending, pending.via) for n, pending in taken if pending is not None]
