"""Group: some workers in an order, by name. A module may make one before its worker has joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final, overload

from gradwire.agent.peers.directory import WorkerInfo, check_name
from gradwire.errors import ArgumentTypeError, UsageError
from gradwire.rpc.expose.registry import expose

GroupMember = str | WorkerInfo


@expose  # so that it may be an argument of a call
@final
@dataclass(frozen=True)
class Group:
    """Some workers in an order, as `group` makes them; `to=` takes it, and `barrier` too."""

    name: str
    """empty, if it was given none"""
    members: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, worker: object) -> bool:
        return (worker.name if isinstance(worker, WorkerInfo) else worker) in self.members

    def __str__(self) -> str:
        return self.name or ", ".join(self.members)


@overload
def group(name: str, workers: Iterable[GroupMember], /) -> Group: ...


@overload
def group(workers: Iterable[GroupMember], /) -> Group: ...


def group(first: str | Iterable[GroupMember], second: Iterable[GroupMember] | None = None) -> Group:
    """Name some workers: `group(["w1", "w2"])`, or `group("trainers", ["w1", "w2"])`.

    The order is that of the results of a call to all of them.
    """
    name, workers = ("", first) if second is None else (first, second)
    if not isinstance(name, str) or isinstance(workers, str) or not isinstance(workers, Iterable):
        raise ArgumentTypeError(
            "group() takes the names of workers, and perhaps a name before them",
            hint='write group(["w1", "w2"]), or group("trainers", ["w1", "w2"])',
        )
    members = tuple(map(_name_of, workers))
    if name:
        check_name(name)
    if not members:
        raise UsageError(f"group {name or '()'} has no workers", hint="name at least one")
    twice = sorted({each for each in members if members.count(each) > 1})
    if twice:
        raise UsageError(
            f"group {name or '()'} names {', '.join(twice)} more than once",
            hint="a group has each worker once; a call to a list may name one again",
        )
    return Group(name, members)


def _name_of(worker: object) -> str:
    name = worker.name if isinstance(worker, WorkerInfo) else worker
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"a group has names of workers, not a {type(name).__name__}",
            hint="get_worker_info(…).name is the name of a worker",
        )
    check_name(name)
    return name
