"""Who takes part, and where each is reached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import msgspec

from gradwire.errors import UnknownWorker, UsageError
from gradwire.ids import WorkerId


class WorkerInfo(msgspec.Struct, frozen=True, order=True):
    """A worker's name and number, as `get_worker_info` gives it and `to=` takes it."""

    name: str
    id: WorkerId

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@final
class Directory:
    """The workers of one job."""

    def __init__(self, me: WorkerId, members: Iterable[tuple[WorkerInfo, str]]) -> None:
        self._addresses: dict[WorkerId, str] = {}
        self._by_id: dict[WorkerId, WorkerInfo] = {}
        self._by_name: dict[str, WorkerInfo] = {}
        for info, address in members:
            self._add(info, address)
        self.me = self._by_id[me]

    def _add(self, info: WorkerInfo, address: str) -> None:
        if info.name in self._by_name:
            other = self._by_name[info.name].id
            raise UsageError(
                f"RPC worker name {info.name} is not unique. "
                f"Workers {other} and {info.id} share the same name."
            )
        self._by_id[info.id] = self._by_name[info.name] = info
        self._addresses[info.id] = address

    def all(self) -> list[WorkerInfo]:
        """Everyone, this worker included, by number."""
        return sorted(self._by_id.values(), key=lambda info: info.id)

    def others(self) -> list[WorkerInfo]:
        """Everyone else."""
        return [info for info in self.all() if info != self.me]

    def address(self, worker: WorkerId) -> str:
        """Where its listener is."""
        return self._addresses[worker]

    def name(self, worker: WorkerId) -> str:
        """What people call it."""
        info = self._by_id.get(worker)
        return f"worker {worker}" if info is None else info.name

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker meant by a name, a number or an info."""
        if isinstance(to, WorkerInfo):
            to = to.name
        found = self._by_name.get(to) if isinstance(to, str) else self._by_id.get(to)
        if found is None:
            kind = "name" if isinstance(to, str) else "id"
            known = ", ".join(info.name for info in self.all())
            raise UnknownWorker(
                f"{self.me.name} could not find destination {kind} {to}",
                hint=f"the workers are: {known}",
            )
        return found
