"""What is known of all workers, from their latest statuses: rates, lanes and who is silent. Pure.

Time is an argument. `view` is what the page and `gradwire top` show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import final

import msgspec
from msgspec.structs import replace

from gradwire.seeing.status import Doing, Status, doing
from gradwire.seeing.waits import Wait, cycles_of, waits_of

LANE_SECONDS = 10.0
MOST_WAITS = 200
_MOST_LISTED = 100
_RATE_SECONDS = 2.0
LETTERS = {
    Doing.RUNS: "r",
    Doing.WAITS: "w",
    Doing.IDLE: "i",
    Doing.SILENT: "s",
    Doing.UNKNOWN: "u",
}
"""how a lane writes what a worker did"""


class Rates(msgspec.Struct, frozen=True):
    """Per second, over the last two."""

    made: float = 0.0
    served: float = 0.0
    sent: float = 0.0
    received: float = 0.0


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker."""

    name: str
    doing: str
    silent: float | None = None
    """for how many seconds it has not answered, if it should have"""
    why: str = ""
    """what asking it raised last"""
    incarnation: int = 0
    pid: int = 0
    threads: int = 0
    rss: int = 0
    in_flight: int = 0
    serves: int = 0
    passes: int = 0
    edges: int = 0
    contexts: int = 0
    references: int = 0
    failed: int = 0
    """calls made here that raised"""
    rates: Rates = Rates()
    lane: str = ""
    """what it did in the last ten seconds, a letter for each look, the latest last"""


class ServedRow(msgspec.Struct, frozen=True):
    """A function that runs on a worker, or is queued there (`age` is None)."""

    worker: str
    peer: str
    n: int
    what: str
    age: float | None


class EdgeRow(msgspec.Struct, frozen=True):
    """An edge that holds a graph on a worker."""

    worker: str
    edge: str
    to: str
    age: float
    bytes: int
    line: str


class Exchanged(msgspec.Struct, frozen=True):
    """What one worker has sent to another."""

    worker: str
    peer: str
    bytes: int
    rate: float


class View(msgspec.Struct, frozen=True):
    """All workers at one moment."""

    worker: str
    """the one that asks the others"""
    pid: int
    program: str
    period: float
    """seconds between two looks"""
    workers: list[WorkerRow]
    waits: list[Wait]
    hidden_waits: int
    cycles: list[list[str]]
    served: list[ServedRow]
    edges: list[EdgeRow]
    traffic: list[Exchanged]


class _Known:
    """One worker: its latest statuses and its lane."""

    def __init__(self, lane: int, now: float) -> None:
        self.samples: deque[tuple[float, Status]] = deque(maxlen=64)
        self.lane: deque[str] = deque("u" * lane, maxlen=lane)
        self.asked_since = now
        """when it was asked first of what it has not answered"""
        self.why = ""


@final
class History:
    """What one worker knows of all."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._known: dict[str, _Known] = {}
        self.silent_after = max(1.0, 3 * period)

    def members(self, names: Iterable[str], now: float) -> None:
        """The workers that there are; of others nothing is kept."""
        lane = round(LANE_SECONDS / self._period)
        known = self._known
        self._known = {name: known.get(name) or _Known(lane, now) for name in names}

    def heard(self, name: str, status: Status, now: float) -> None:
        """A worker has answered."""
        if (known := self._known.get(name)) is None:
            return
        latest = known.samples[-1][1] if known.samples else status
        if (latest.pid, latest.incarnation) != (status.pid, status.incarnation):
            known.samples.clear()  # its counts have begun anew
        known.samples.append((now, status))
        while len(known.samples) > 1 and known.samples[0][0] < now - _RATE_SECONDS:
            known.samples.popleft()
        known.asked_since, known.why = now, ""

    def failed(self, name: str, why: str) -> None:
        """Asking a worker has raised."""
        if known := self._known.get(name):
            known.why = why

    def slept(self, now: float) -> None:
        """Nobody was asked for a while: nothing can be said of that time."""
        for known in self._known.values():
            known.samples.clear()
            known.asked_since = now
            known.lane.extend("u" * (known.lane.maxlen or 0))

    def tick(self, now: float) -> None:
        """The lanes go on by one look."""
        for known in self._known.values():
            known.lane.append(LETTERS[self._doing(known, now)])

    def is_complete(self, now: float) -> bool:
        """Whether each worker has answered, or had time to."""
        return all(each.samples or self._silence(each, now) for each in self._known.values())

    def view(self, now: float, worker: str, pid: int, program: str) -> View:
        """All of it."""
        known = self._known.items()
        latest = [_aged(*each.samples[-1], now) for _, each in known if each.samples]
        waits = waits_of(latest)
        return View(
            worker,
            pid,
            program,
            self._period,
            [self._row(name, each, now) for name, each in known],
            waits[:MOST_WAITS],
            max(0, len(waits) - MOST_WAITS),
            cycles_of(waits),
            _served(latest),
            _edges(latest),
            [row for name, each in known for row in _exchanged(name, each)],
        )

    def _silence(self, known: _Known, now: float) -> float | None:
        silent = now - known.asked_since
        return silent if silent >= self.silent_after else None

    def _doing(self, known: _Known, now: float) -> Doing:
        if self._silence(known, now) is not None:
            return Doing.SILENT
        return doing(known.samples[-1][1]) if known.samples else Doing.UNKNOWN

    def _row(self, name: str, known: _Known, now: float) -> WorkerRow:
        at = self._doing(known, now).value
        silent, lane = self._silence(known, now), "".join(known.lane)
        if not known.samples:
            return WorkerRow(name, at, silent, known.why, lane=lane)
        latest = known.samples[-1][1]
        return WorkerRow(
            name,
            at,
            silent,
            known.why,
            latest.incarnation,
            latest.pid,
            latest.threads,
            latest.rss,
            latest.totals.in_flight,
            latest.totals.served_now,
            latest.totals.passes,
            latest.totals.edges,
            latest.totals.contexts,
            latest.totals.references,
            latest.totals.calls_failed,
            Rates() if silent is not None else _rates(known),
            lane,
        )


def _aged(at: float, status: Status, now: float) -> Status:
    """A status that is not new: what waited and ran then still does, as far as is known."""
    gone = max(0.0, now - at)
    return replace(
        status,
        in_flight=[replace(r, age=r.age + gone, left=r.left - gone) for r in status.in_flight],
        passes=[replace(p, age=p.age + gone, left=p.left - gone) for p in status.passes],
        serves=[s if s.age is None else replace(s, age=s.age + gone) for s in status.serves],
        edges=[replace(e, age=e.age + gone) for e in status.edges],
    )


def _per_second(known: _Known, count: Callable[[Status], int]) -> float:
    (first, before), (last, after) = known.samples[0], known.samples[-1]
    return max(0, count(after) - count(before)) / (last - first) if last > first else 0.0


def _rates(known: _Known) -> Rates:
    return Rates(
        _per_second(known, lambda status: status.totals.calls_made),
        _per_second(known, lambda status: status.totals.calls_served),
        _per_second(known, lambda status: sum(peer.sent_bytes for peer in status.traffic)),
        _per_second(known, lambda status: sum(peer.received_bytes for peer in status.traffic)),
    )


def _exchanged(name: str, known: _Known) -> list[Exchanged]:
    if not known.samples:
        return []
    (first, before), (last, after) = known.samples[0], known.samples[-1]
    earlier = {peer.peer: peer.sent_bytes for peer in before.traffic}
    found = []
    for peer in after.traffic:
        new = max(0, peer.sent_bytes - earlier.get(peer.peer, 0))
        rate = new / (last - first) if last > first else 0.0
        if peer.sent_bytes:
            found.append(Exchanged(name, peer.peer, peer.sent_bytes, rate))
    return found


def _served(statuses: Iterable[Status]) -> list[ServedRow]:
    rows = [
        ServedRow(status.worker, each.peer, each.n, each.what, each.age)
        for status in statuses
        for each in status.serves
    ]
    rows.sort(key=lambda row: (row.age is None, -(row.age or 0.0)))
    return rows[:_MOST_LISTED]


def _edges(statuses: Iterable[Status]) -> list[EdgeRow]:
    rows = [
        EdgeRow(status.worker, edge.edge, edge.to, edge.age, edge.bytes, edge.line)
        for status in statuses
        for edge in status.edges
    ]
    rows.sort(key=lambda row: -row.age)
    return rows[:_MOST_LISTED]
