"""The workers of a job, with names and addresses: the driver of state.py."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import final

import msgspec

from gradwire.agent.peers.state import Member, Members
from gradwire.errors import PeerLost, UnknownWorker, UsageError
from gradwire.ids import ContextId, WorkerId, count_of, first_of, opener_of

_NAME = re.compile(r"[A-Za-z0-9\-_:]{1,127}")


def check_name(name: str) -> None:
    """UsageError for a name that has other characters than addresses and traces allow."""
    if not _NAME.fullmatch(name):
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


@final
class Directory:
    """The workers of one job, as one of them knows them."""

    def __init__(
        self,
        me: WorkerId,
        members: Iterable[tuple[WorkerInfo, str] | Member],
        *,
        is_open: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        """the lock of the worker: most of its tables are changed with this lock held"""
        self._members = Members(me, map(_member, members), is_open=is_open)
        self._infos: dict[Member, WorkerInfo] = {}
        self._since: dict[WorkerId, tuple[int, int]] = {}
        self.is_open = is_open
        """whether workers join and leave at any time"""
        self.myself = self._members.me
        self.me = _info(self.myself)

    def all(self) -> list[WorkerInfo]:
        """All workers, this one included, by number."""
        return [_info(member) for member in self._members.all()]

    def others(self) -> list[WorkerInfo]:
        """All other workers."""
        return [info for info in self.all() if info != self.me]

    def has(self, worker: WorkerId) -> bool:
        """Whether a worker with this number is present now."""
        return worker in self._members.by_id

    def address(self, worker: WorkerId) -> str:
        """The address of its listener; PeerLost if it has left."""
        member = self._members.by_id.get(worker)
        if member is None:
            raise PeerLost(f"{self.name(worker)} has left, or never joined")
        return member.address

    def name(self, worker: WorkerId) -> str:
        """Its name, even after it has left."""
        member = self._members.latest.get(worker)
        return f"worker {worker}" if member is None else member.name

    def life(self, worker: WorkerId) -> int:
        """Its present life (incarnation), or the last one if it has left."""
        member = self._members.latest.get(worker)
        return 0 if member is None else member.life

    def note(self, worker: WorkerId) -> str:
        """The text that it published beside its name and address."""
        member = self._members.latest.get(worker)
        return "" if member is None else member.note

    def had_earlier(self, worker: WorkerId) -> bool:
        """Whether an earlier life used this number. See Note [Contexts and lives]."""
        return worker in self._members.gone

    def greeted(self, worker: WorkerId, life: int, since: int) -> None:
        """Keep the `since` of a peer's Hello; the first one of each life counts."""
        with self.lock:
            known = self._since.get(worker)
            if known is None or known[0] < life:
                self._since[worker] = life, since

    def maybe_too_old(self, context: ContextId) -> str | None:
        """Why this life must not take part in a context of another worker; None if it may.

        Note [Contexts and lives]: edges are numbered by worker and context. Two lives of one worker
        in one context would use the same number twice, and a gradient could reach the wrong edge.
        So a life takes part only in contexts that are younger than itself. Only their opener knows
        which those are: its first Hello says it. A worker that may have had an earlier life takes
        no part in contexts of openers it has not met. And a context whose opener is in a later life
        by now is dropped everywhere, however late a message names it.
        """
        opener, me = opener_of(context), self.myself
        if opener == me.id:
            return None
        if count_of(context) < first_of(self.life(opener)):
            return f"belongs to an earlier life of {self.name(opener)}"
        known = self._since.get(opener)
        may_be_older = not self.is_open and me.life > 0
        if may_be_older if known is None else count_of(context) < known[1]:
            return f"was opened before this life of {me.name} began"
        return None

    def admit(self, said: Member) -> list[WorkerId]:
        """Add a peer that says who it is; returns the numbers whose earlier life it ends."""
        with self.lock:
            return [member.id for member in self._members.admit(said)]

    def move(self, worker: WorkerId, address: str) -> str:
        """Dial a worker at this address from now on; returns the address until now."""
        before = self.address(worker)
        with self.lock:
            self._members.moved(worker, address)
        return before

    def left(self, worker: WorkerId, life: int) -> bool:
        """Remove a worker that has left; False if this life was removed before."""
        with self.lock:
            return self._members.left(worker, life) is not None

    def number(self, to: str | int | WorkerInfo) -> WorkerId:
        """The number of the worker meant by a name, a number or an info.

        hot: every call
        """
        found = self._members.by_name.get(to) if type(to) is str else None
        return self.find(to).id if found is None else found.id

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker meant by a name, a number or an info."""
        if isinstance(to, WorkerInfo):
            to = to.name
        members = self._members
        found = members.by_name.get(to) if isinstance(to, str) else members.by_id.get(to)
        if found is None:
            kind = "name" if isinstance(to, str) else "id"
            known = ", ".join(info.name for info in self.all())
            raise UnknownWorker(
                f"{self.me.name} could not find destination {kind} {to}",
                hint=f"the workers are: {known}",
            )
        info = self._infos.get(found)
        if info is None:
            info = self._infos[found] = _info(found)
        return info


def _member(member: tuple[WorkerInfo, str] | Member) -> Member:
    if isinstance(member, Member):
        return member
    info, address = member
    return Member(info.id, info.name, address)


def _info(member: Member) -> WorkerInfo:
    return WorkerInfo(member.name, member.id)
