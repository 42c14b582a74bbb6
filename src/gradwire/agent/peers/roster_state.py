"""The table of an open world: who has taken a seat, in which life, and who has told the others.

Rules of this file:
  1. Pure, and a value: every change is a new roster. Whoever keeps it writes the new one in the
     place of the old one, or asks again if somebody else was faster.
  2. Lives are numbered by the roster, so a later worker always has a higher one.

A newcomer takes a seat first and is *settled* once everyone in an earlier seat knows it. It waits
until those in earlier seats are settled themselves: so any two members know each other when both
are. Nobody waits for a later seat, so no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import final

from gradwire.agent.peers.state import Member
from gradwire.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Seat:
    """One member, and whether the others have heard of it."""

    member: Member
    is_settled: bool = False


@final
@dataclass(frozen=True, slots=True)
class Roster:
    """See the top of this file."""

    job: str
    lives: int = 0
    seats: tuple[Seat, ...] = ()

    def claimed(self, name: str, id: WorkerId) -> list[Member]:
        """Who has this name or this number already."""
        members = [seat.member for seat in self.seats]
        return [member for member in members if member.name == name or member.id == id]

    def taken(self, name: str, id: WorkerId, address: str, note: str = "") -> tuple[Roster, Member]:
        """One more seat, for a new life."""
        member = Member(id, name, address, self.lives + 1, note)
        return replace(self, lives=member.life, seats=(*self.seats, Seat(member))), member

    def settled(self, life: int) -> Roster:
        """Everyone knows this member."""
        seats = [replace(s, is_settled=True) if s.member.life == life else s for s in self.seats]
        return replace(self, seats=tuple(seats))

    def without(self, lives: Collection[int]) -> Roster:
        """These have left, or are dead."""
        return replace(self, seats=tuple(s for s in self.seats if s.member.life not in lives))

    def has(self, life: int) -> bool:
        """Whether this member still has its seat."""
        return any(seat.member.life == life for seat in self.seats)

    def before(self, life: int) -> list[Member]:
        """Those in earlier seats."""
        return [seat.member for seat in self.seats if seat.member.life < life]

    def unsettled_before(self, life: int) -> list[Member]:
        """Those in earlier seats who have not told everyone yet."""
        return [s.member for s in self.seats if s.member.life < life and not s.is_settled]
