"""The members of a job: `Members` as one worker knows them, and an open world's shared `Roster`.

Rules of this file:
  1. Pure. `Members.admit` takes what a peer says of itself and returns whom to give up. A `Roster`
     is a value: every change makes a new one, which the store takes only in place of the old one.
  2. A worker is its number, its name and its *life* (incarnation). Number and name may be reused
     once their worker is gone. The life is new then, and higher than any before it in the same job.
  3. A life that ended does not come back: messages of it that come late are refused.

A *closed* world has the members it began with, each in its first life or a later one. An *open* one
admits every worker that knows the secret of its job.

A worker that joins an open world first gets an entry in the roster. It is *announced* once every
worker with an earlier entry knows it. It waits until those are announced themselves: so any two
members know each other when both are. No worker waits for a later entry, so there is no cycle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import final

from gradwire.errors import BadMessage, UsageError
from gradwire.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Member:
    """One worker in one life. `note` is text for the layers above; not read here."""

    id: WorkerId
    name: str
    address: str
    life: int = 0
    note: str = ""


@final
class Members:
    """The members that one worker knows. Its dicts are replaced, never changed: no lock to read."""

    def __init__(self, me: WorkerId, members: Iterable[Member], *, is_open: bool = False) -> None:
        self.by_id: dict[WorkerId, Member] = {}
        self.by_name: dict[str, Member] = {}
        self.gone: dict[WorkerId, Member] = {}
        """the last member that had each number before the present one"""
        self.latest: dict[WorkerId, Member] = {}
        """the member that has each number, or had it last"""
        self._is_open = is_open
        for member in members:
            self._check_unique(member)
            self._add(member)
        self.me = self.by_id[me]

    def all(self) -> list[Member]:
        """All present members, by number."""
        return sorted(self.by_id.values(), key=lambda member: member.id)

    def admit(self, said: Member) -> list[Member]:
        """Add a peer that says who it is; returns those it replaces. BadMessage if it may not."""
        known = self.by_id.get(said.id)
        if known is not None and (known.name, known.life) == (said.name, said.life):
            return []
        replaced = [] if known is None else [known]
        namesake = self.by_name.get(said.name)
        if namesake is not None and namesake is not known:
            replaced.append(namesake)
        is_back = known is not None and replaced == [known] and known.name == said.name
        if self.me in replaced or not (self._is_open or is_back):
            raise BadMessage(f"{said.name} claims the number of {self._name(said.id)}")
        earlier = [*replaced, *filter(None, [self.gone.get(said.id)])]
        if any(said.life <= member.life for member in earlier):
            raise BadMessage(f"{said.name} speaks for an earlier life of {self._name(said.id)}")
        for member in replaced:
            self._remove(member)
        self._add(said)
        return replaced

    def left(self, id: WorkerId, life: int) -> Member | None:
        """Remove a member that leaves; None if it is gone already, or back in a later life."""
        known = self.by_id.get(id)
        if known is None or known.life != life:
            return None
        self._remove(known)
        return known

    def moved(self, id: WorkerId, address: str) -> None:
        """Change the address at which this worker dials a member."""
        self._add(replace(self.by_id[id], address=address))

    def _check_unique(self, member: Member) -> None:
        other = self.by_name.get(member.name)
        if other is not None:
            raise not_unique(member.name, other.id, member.id)

    def _add(self, member: Member) -> None:
        self.by_id = {**self.by_id, member.id: member}
        self.by_name = {**self.by_name, member.name: member}
        self.latest = {**self.latest, member.id: member}

    def _remove(self, member: Member) -> None:
        self.by_id = {id: other for id, other in self.by_id.items() if other is not member}
        self.by_name = {name: other for name, other in self.by_name.items() if other != member}
        self.gone[member.id] = member

    def _name(self, id: WorkerId) -> str:
        known = self.latest.get(id)
        return f"worker {id}" if known is None else known.name


def not_unique(name: str, one: WorkerId, other: WorkerId) -> UsageError:
    """The error for two workers of one name."""
    return UsageError(
        f"RPC worker name {name} is not unique. Workers {one} and {other} share the same name.",
        hint="give each worker of a job a name of its own",
    )


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """One member, and whether the others know it."""

    member: Member
    is_announced: bool = False


@final
@dataclass(frozen=True, slots=True)
class Roster:
    """The members of an open world, in the order of their joining; the store holds it as JSON."""

    job: str
    lives: int = 0
    entries: tuple[RosterEntry, ...] = ()

    def holders(self, name: str, id: WorkerId) -> list[Member]:
        """The members that have this name or this number already."""
        members = [entry.member for entry in self.entries]
        return [member for member in members if member.name == name or member.id == id]

    def with_member(
        self, name: str, id: WorkerId, address: str, note: str = ""
    ) -> tuple[Roster, Member]:
        """The roster with one more member, in a new life; and that member."""
        member = Member(id, name, address, self.lives + 1, note)
        entries = (*self.entries, RosterEntry(member))
        return replace(self, lives=member.life, entries=entries), member

    def with_announced(self, life: int) -> Roster:
        """The roster in which this life is announced."""
        entries = tuple(
            replace(e, is_announced=True) if e.member.life == life else e for e in self.entries
        )
        return replace(self, entries=entries)

    def without(self, lives: Collection[int]) -> Roster:
        """The roster without these lives."""
        return replace(self, entries=tuple(e for e in self.entries if e.member.life not in lives))

    def has(self, life: int) -> bool:
        """Whether this life is still in the roster."""
        return any(entry.member.life == life for entry in self.entries)

    def before(self, life: int) -> list[Member]:
        """The members with earlier entries."""
        return [entry.member for entry in self.entries if entry.member.life < life]

    def unannounced_before(self, life: int) -> list[Member]:
        """The members with earlier entries that are not announced yet."""
        return [e.member for e in self.entries if e.member.life < life and not e.is_announced]
