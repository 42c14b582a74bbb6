"""The workers of a job: the directory that each of them has, and the roster of an open world.

A worker is its number, its name and its incarnation. Number and name may be reused once their
worker is gone. The incarnation is new then, and higher than any before it in the same job.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import final

import msgspec

from gradwire.errors import BadMessage, PeerLost, UnknownWorker, UsageError
from gradwire.ids import WORKER_NAME, ContextId, WorkerId, count_of, first_of, opener_of


def check_name(name: str) -> None:
    """UsageError for a name that has other characters than addresses and traces allow."""
    if not WORKER_NAME.fullmatch(name):
        raise UsageError(
            f"Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and "
            f"shorter than 128 chars, but got {name}"
        )


class WorkerInfo(msgspec.Struct, frozen=True, order=True):
    """A worker's name and number, as `get_worker_info` gives it and `to=` takes it."""

    name: str
    id: WorkerId

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


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


@final
class Directory:
    """The workers of one job, as one of them knows them. Reading needs no lock.

    Its dicts of members are replaced, never changed; an entry of `_gone` is set in one step.
    """

    def __init__(self, me: WorkerId, members: Iterable[Member], *, is_open: bool = False) -> None:
        self.lock = threading.RLock()
        """the lock of the worker: most of its tables are changed with this lock held"""
        self.is_open = is_open  # whether workers join and leave at any time
        self._by_id: dict[WorkerId, Member] = {}
        self._by_name: dict[str, Member] = {}
        self._gone: dict[WorkerId, Member] = {}
        """the last member that had each number before the present one, or if there is none"""
        self._since: dict[WorkerId, tuple[int, int]] = {}
        for member in members:
            other = self._by_name.get(member.name)
            if other is not None:
                raise not_unique(member.name, other.id, member.id)
            self._add(member)
        self.myself = self._by_id[me]
        self.me = WorkerInfo(self.myself.name, me)

    def all(self) -> list[WorkerInfo]:
        """All workers, this one included, by number."""
        return [WorkerInfo(member.name, id) for id, member in sorted(self._by_id.items())]

    def others(self) -> list[WorkerInfo]:
        """All other workers."""
        return [info for info in self.all() if info != self.me]

    def has(self, worker: WorkerId) -> bool:
        """Whether a worker with this number is present now."""
        return worker in self._by_id

    def address(self, worker: WorkerId) -> str:
        """The address of its listener; PeerLost if it has left."""
        member = self._by_id.get(worker)
        if member is None:
            raise PeerLost(f"{self.name(worker)} has left, or never joined")
        return member.address

    def name(self, worker: WorkerId) -> str:
        """Its name, even after it has left."""
        member = self._by_id.get(worker) or self._gone.get(worker)
        return f"worker {worker}" if member is None else member.name

    def incarnation(self, worker: WorkerId) -> int:
        """Its present incarnation, or the last one if it has left."""
        member = self._by_id.get(worker) or self._gone.get(worker)
        return 0 if member is None else member.incarnation

    def note(self, worker: WorkerId) -> str:
        """The text that it published beside its name and address."""
        member = self._by_id.get(worker) or self._gone.get(worker)
        return "" if member is None else member.note

    def had_earlier(self, worker: WorkerId) -> bool:
        """Whether an earlier incarnation used this number. See Note [Contexts and incarnations]."""
        return worker in self._gone

    def greeted(self, worker: WorkerId, incarnation: int, since: int) -> None:
        """Keep the `since` of a peer's Hello; the first one of each incarnation counts."""
        with self.lock:
            known = self._since.get(worker)
            if known is None or known[0] < incarnation:
                self._since[worker] = incarnation, since

    def maybe_too_old(self, context: ContextId) -> str | None:
        """Why this incarnation must not take part in a peer's context; None if it may.

        Note [Contexts and incarnations]: the gradients that a context has on a worker are lost with
        that worker's incarnation. A later one would add new ones to none, and a step would use them
        as if they were all. So an incarnation takes part only in contexts that are younger than
        itself. Only their opener knows which those are: its first Hello says it. A worker that may
        have had an earlier incarnation takes no part in contexts of openers it has not met. A
        context of an opener's earlier incarnation is dropped, however late a message names it.
        """
        opener, me = opener_of(context), self.myself
        if opener == me.id:
            return None
        if count_of(context) < first_of(self.incarnation(opener)):
            return f"belongs to an earlier incarnation of {self.name(opener)}"
        known = self._since.get(opener)
        may_be_older = not self.is_open and me.incarnation > 0
        if may_be_older if known is None else count_of(context) < known[1]:
            return f"was opened before this incarnation of {me.name} began"
        return None

    def admit(self, said: Member) -> list[WorkerId]:
        """Add a peer that says who it is; returns the numbers whose earlier incarnation it ends.

        BadMessage if it may not: a closed world has the members it began with, in any incarnation.
        An open one admits every worker that knows the secret. An ended incarnation stays away.
        """
        with self.lock:
            known = self._by_id.get(said.id)
            this = said.name, said.incarnation
            if known is not None and (known.name, known.incarnation) == this:
                return []
            namesake = self._by_name.get(said.name)
            is_back = known is not None and known is namesake
            others = [known] if is_back else [known, namesake]
            replaced = [member for member in others if member is not None]
            if self.myself in replaced or not (self.is_open or is_back):
                raise BadMessage(f"{said.name} claims the number of {self.name(said.id)}")
            earlier = [*replaced, *filter(None, [self._gone.get(said.id)])]
            if any(said.incarnation <= member.incarnation for member in earlier):
                name = self.name(said.id)
                raise BadMessage(f"{said.name} speaks for an earlier incarnation of {name}")
            for member in replaced:
                self._remove(member)
            self._add(said)
        return [member.id for member in replaced]

    def left(self, worker: WorkerId, incarnation: int) -> bool:
        """Remove a worker that leaves; False if this incarnation is gone already."""
        with self.lock:
            known = self._by_id.get(worker)
            if known is None or known.incarnation != incarnation:
                return False
            self._remove(known)
        return True

    def _add(self, member: Member) -> None:
        self._by_id = {**self._by_id, member.id: member}
        self._by_name = {**self._by_name, member.name: member}

    def _remove(self, member: Member) -> None:
        self._gone[member.id] = member  # first: other threads look there for those not in `_by_id`
        self._by_id = {id: other for id, other in self._by_id.items() if other is not member}
        self._by_name = {name: other for name, other in self._by_name.items() if other != member}

    def number(self, to: str | int | WorkerInfo) -> WorkerId:
        """The number of the worker meant by a name, a number or an info. hot: every call"""
        found = self._by_name.get(to)  # type: ignore[arg-type]  # others than names are not there
        return self.find(to).id if found is None else found.id

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker meant by a name, a number or an info."""
        if isinstance(to, WorkerInfo):
            to = to.name
        found = self._by_name.get(to) if isinstance(to, str) else self._by_id.get(to)
        if found is None:
            kind = "name" if isinstance(to, str) else "id"
            raise UnknownWorker(
                f"{self.me.name} could not find destination {kind} {to}",
                hint=f"the workers are: {', '.join(info.name for info in self.all())}",
            )
        return WorkerInfo(found.name, found.id)


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """One member, and whether the others know it."""

    member: Member
    is_announced: bool = False


@final
@dataclass(frozen=True, slots=True)
class Roster:
    """The members of an open world, in the order of their joining; the store holds it as JSON.

    It is a value: every change makes a new one, which the store takes only in place of the old one.
    A worker that joins first gets an entry, and is *announced* once every worker with an earlier
    entry knows it. It waits until those are announced themselves: so any two members know each
    other when both are. No worker waits for a later entry, so there is no cycle.
    """

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
