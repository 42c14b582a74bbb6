"""Who takes part, as one worker knows it: who is let in, whom a newcomer replaces, who has left.

Rules of this file:
  1. Pure. What a peer says of itself comes in; whom to give up comes out.
  2. A worker is its number, its name and its *life*. Number and name may be taken again once their
     worker is gone; the life is new then, and higher than any before it in the same job.
  3. A life that ended does not come back: what is late of it is refused.

A *closed* world has the members it began with, each in its first life or a later one. An *open*
one admits whoever knows its job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import final

from gradwire.errors import BadMessage, UsageError
from gradwire.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Member:
    """One worker in one life. `note` is what it lets the others know besides; not read here."""

    id: WorkerId
    name: str
    address: str
    life: int = 0
    note: str = ""


@final
class Members:
    """See the top of this file. Reading needs no lock: what was read is replaced, never changed."""

    def __init__(self, me: WorkerId, members: Iterable[Member], *, is_open: bool = False) -> None:
        self._by_id: dict[WorkerId, Member] = {}
        self._by_name: dict[str, Member] = {}
        self._gone: dict[WorkerId, Member] = {}
        self._is_open = is_open
        for member in members:
            self._check_unique(member)
            self._add(member)
        self.me = self._by_id[me]

    def all(self) -> list[Member]:
        """Everyone who takes part, by number."""
        return sorted(self._by_id.values(), key=lambda member: member.id)

    def numbered(self, id: WorkerId) -> Member | None:
        """Who has this number now."""
        return self._by_id.get(id)

    def named(self, name: str) -> Member | None:
        """Who has this name now."""
        return self._by_name.get(name)

    def remembered(self, id: WorkerId) -> Member | None:
        """Who has this number, or had it last."""
        return self._by_id.get(id) or self._gone.get(id)

    def had_earlier(self, id: WorkerId) -> bool:
        """Whether this number was used before, by another life than the one that has it now."""
        return id in self._gone

    def admit(self, said: Member) -> list[Member]:
        """A peer says who it is: those it takes the place of, or BadMessage if it may not."""
        known = self._by_id.get(said.id)
        if known is not None and (known.name, known.life) == (said.name, said.life):
            return []
        replaced = [] if known is None else [known]
        namesake = self._by_name.get(said.name)
        if namesake is not None and namesake is not known:
            replaced.append(namesake)
        is_back = known is not None and replaced == [known] and known.name == said.name
        if self.me in replaced or not (self._is_open or is_back):
            raise BadMessage(f"{said.name} claims the number of {self._spoken(said.id)}")
        earlier = [*replaced, *filter(None, [self._gone.get(said.id)])]
        if any(said.life <= member.life for member in earlier):
            raise BadMessage(f"{said.name} speaks for an earlier life of {self._spoken(said.id)}")
        for member in replaced:
            self._remove(member)
        self._add(said)
        return replaced

    def left(self, id: WorkerId, life: int) -> Member | None:
        """A member says goodbye; None if it is not here any more, or only in a later life."""
        known = self._by_id.get(id)
        if known is None or known.life != life:
            return None
        self._remove(known)
        return known

    def moved(self, id: WorkerId, address: str) -> None:
        """A member is reached there now, as far as this worker is concerned."""
        self._add(replace(self._by_id[id], address=address))

    def _check_unique(self, member: Member) -> None:
        other = self._by_name.get(member.name)
        if other is not None:
            raise not_unique(member.name, other.id, member.id)

    def _add(self, member: Member) -> None:
        self._by_id = {**self._by_id, member.id: member}
        self._by_name = {**self._by_name, member.name: member}

    def _remove(self, member: Member) -> None:
        self._by_id = {id: other for id, other in self._by_id.items() if other is not member}
        self._by_name = {name: other for name, other in self._by_name.items() if other != member}
        self._gone[member.id] = member

    def _spoken(self, id: WorkerId) -> str:
        known = self.remembered(id)
        return f"worker {id}" if known is None else known.name


def not_unique(name: str, one: WorkerId, other: WorkerId) -> UsageError:
    """What two workers of one name are told."""
    return UsageError(
        f"RPC worker name {name} is not unique. Workers {one} and {other} share the same name.",
        hint="give each worker of a job a name of its own",
    )


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
