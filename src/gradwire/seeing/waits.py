"""Who waits for whom, since when and until when, from the statuses of all workers. Pure.

Note [Cycles of waits]: a call that calls back is no cycle: w0 waits for w1, whose function waits
for w0, where a function runs. So a wait is followed through the functions that were called to the
worker at the end of the chain. If workers wait for each other that way, and have done so for a
while, that is a deadlock, unless one of the functions at the ends still computes: locks of the
user are not seen here, their stacks tell. A pass whose engine runs at the awaited worker and waits
for nothing there goes on, and is no part of a cycle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from gradwire.options import FOREVER
from gradwire.seeing.status import PassNow, Status

CYCLE_SECONDS = 1.0
"""Younger waits make no cycle: workers that call each other often wait at the same moment."""

_Key = tuple[str, str, int]


class Wait(msgspec.Struct, frozen=True):
    """A worker waits for another one."""

    worker: str
    peer: str
    what: str
    age: float
    left: float | None
    """until its deadline; None if it has none"""
    n: int = 0
    """the number of the request at the worker; 0 if it is none"""
    made_for: tuple[str, int] | None = None
    """the request that the worker serves by it: the peer, and the number there"""
    ends_at: tuple[str, ...] = ()
    """the workers where the functions run that the last ones in its chain of calls wait for"""
    in_cycle: bool = False
    goes_on: bool = False
    """the awaited worker is at work on it, as far as is known"""


def waits_of(statuses: Iterable[Status]) -> list[Wait]:
    """Every wait, the oldest first, with the ends of its chain; those in a cycle are marked."""
    known = list(statuses)
    running = {(each.worker, one.id) for each in known for one in each.passes if _goes_on(one)}
    waits = [wait for status in known for wait in _of_one(status, running)]
    waits.sort(key=lambda wait: (-wait.age, wait.worker, wait.n))
    return _marked(waits)


def cycles_of(waits: Iterable[Wait]) -> list[list[str]]:
    """The groups of workers that wait for each other, each sorted by name."""
    after = _edges(waits)
    reached = {worker: _reached_from(worker, after) for worker in after}
    groups = set()
    for worker, there in reached.items():
        group = {other for other in there if worker in reached.get(other, ())}
        if worker in group and len(group) > 1:
            groups.add(tuple(sorted(group)))
    return [list(group) for group in sorted(groups)]


def _of_one(status: Status, running: set[tuple[str, str]]) -> list[Wait]:
    me = status.worker
    found = [
        Wait(me, each.peer, each.what, each.age, _left(each.left), each.n, each.made_for)
        for each in status.in_flight
    ]
    for active in status.passes:
        about = active.age, _left(active.left)
        for edge, peer in active.awaited:
            what = f"the gradients of {edge} in {active.id}"
            found.append(Wait(me, peer, what, *about, goes_on=(peer, active.id) in running))
        for peer in active.not_done:
            what = f"the end of {active.id}"
            found.append(Wait(me, peer, what, *about, goes_on=(peer, active.id) in running))
    return found


def _goes_on(active: PassNow) -> bool:
    return active.runs and not active.awaited and not active.not_done


def _left(seconds: float) -> float | None:
    return None if seconds > FOREVER / 2 else seconds


def _marked(waits: Sequence[Wait]) -> list[Wait]:
    """See Note [Cycles of waits]."""
    nested: defaultdict[_Key, list[int]] = defaultdict(list)
    for place, wait in enumerate(waits):
        if wait.made_for is not None:
            nested[(wait.worker, *wait.made_for)].append(place)
    chains = [_chain(place, waits, nested) for place in range(len(waits))]
    ended = [
        replace(wait, ends_at=tuple(sorted({waits[last].peer for last in lasts})))
        for wait, (_, lasts) in zip(waits, chains, strict=True)
    ]
    group_of = {name: n for n, group in enumerate(cycles_of(ended)) for name in group}
    marked = set()
    for wait, (chain, _) in zip(ended, chains, strict=True):
        mine = group_of.get(wait.worker)
        others = set(wait.ends_at) - {wait.worker}
        if _counts(wait) and mine is not None and mine in map(group_of.get, others):
            marked |= chain
    return [replace(wait, in_cycle=place in marked) for place, wait in enumerate(ended)]


def _chain(
    first: int, waits: Sequence[Wait], nested: dict[_Key, list[int]]
) -> tuple[set[int], set[int]]:
    """The waits that a wait leads to through called functions, itself included; the last ones."""
    chain, lasts, ahead = {first}, set(), [first]
    while ahead:
        wait = waits[place := ahead.pop()]
        made = nested.get((wait.peer, wait.worker, wait.n), []) if wait.n else []
        if not made:
            lasts.add(place)
        ahead += [each for each in made if each not in chain]
        chain.update(made)
    return chain, lasts


def _counts(wait: Wait) -> bool:
    return wait.age >= CYCLE_SECONDS and not wait.goes_on


def _edges(waits: Iterable[Wait]) -> dict[str, set[str]]:
    after: defaultdict[str, set[str]] = defaultdict(set)
    for wait in waits:
        if _counts(wait):
            after[wait.worker].update(end for end in wait.ends_at if end != wait.worker)
    return dict(after)


def _reached_from(worker: str, after: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [worker]
    while ahead:
        for other in after.get(ahead.pop(), ()):
            if other not in seen:
                seen.add(other)
                ahead.append(other)
    return seen
