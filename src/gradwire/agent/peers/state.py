"""A member of a job, and the `Roster` of all members that an open world shares.

A worker is its number, its name and its incarnation. Number and name may be reused once their
worker is gone. The incarnation is new then, and higher than any before it in the same job.

A `Roster` is a value: every change makes a new one, which the store takes only in place of the old
one. A worker that joins first gets an entry in it. It is *announced* once every worker with an
earlier entry knows it. It waits until those are announced themselves: so any two members know each
other when both are. No worker waits for a later entry, so there is no cycle.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import final

from gradwire.errors import UsageError
from gradwire.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Member:
    """One worker in one incarnation. `note` is text for the layers above; not read here."""

    id: WorkerId
    name: str
    address: str
    incarnation: int = 0
    note: str = ""


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
    last_incarnation: int = 0
    entries: tuple[RosterEntry, ...] = ()

    def holders(self, name: str, id: WorkerId) -> list[Member]:
        """The members that have this name or this number already."""
        members = [entry.member for entry in self.entries]
        return [member for member in members if member.name == name or member.id == id]

    def with_member(self, name: str, id: WorkerId, address: str, note: str = "") -> Roster:
        """The roster with one more member, in a new incarnation, as the last entry."""
        new = self.last_incarnation + 1
        entries = (*self.entries, RosterEntry(Member(id, name, address, new, note)))
        return replace(self, last_incarnation=new, entries=entries)

    def with_announced(self, incarnation: int) -> Roster:
        """The roster in which this incarnation is announced."""
        entries = tuple(
            replace(e, is_announced=True) if e.member.incarnation == incarnation else e
            for e in self.entries
        )
        return replace(self, entries=entries)

    def without(self, incarnations: Collection[int]) -> Roster:
        """The roster without these incarnations."""
        entries = tuple(e for e in self.entries if e.member.incarnation not in incarnations)
        return replace(self, entries=entries)

    def has(self, incarnation: int) -> bool:
        """Whether this incarnation is still in the roster."""
        return any(entry.member.incarnation == incarnation for entry in self.entries)

    def before(self, incarnation: int) -> list[Member]:
        """The members with earlier entries."""
        return [entry.member for entry in self.entries if entry.member.incarnation < incarnation]

    def unannounced_before(self, incarnation: int) -> list[Member]:
        """The members with earlier entries that are not announced yet."""
        earlier = [e for e in self.entries if e.member.incarnation < incarnation]
        return [e.member for e in earlier if not e.is_announced]
