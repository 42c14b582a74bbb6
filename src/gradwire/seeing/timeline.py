"""One timeline of all workers: the slices of their threads, and the arrows between them. Pure.

It is made of the events of each worker. Times are seconds of the clock of the worker that traces,
after the beginning of the trace. Threads are numbered as they appear, so that one history gives one
timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gradwire.seeing.clocks import SAME_CLOCK, Offsets
from gradwire.seeing.messages import Event

Way = Literal["call", "answer", "gradient", "start", "end", "hand over"]


@dataclass(frozen=True, slots=True)
class Log:
    """The events of one worker, as it sent them."""

    worker: str
    rank: int
    events: Sequence[Event]
    threads: dict[int, str] = field(default_factory=dict)
    offsets: Offsets = SAME_CLOCK
    dropped: int = 0
    about: str = ""
    """its host and process"""
    ways: dict[str, str] = field(default_factory=dict)
    """how it reaches each peer: unix, tcp, tls, memory"""


class Track(NamedTuple):
    """A thread of a worker."""

    worker: str
    thread: int


@dataclass(frozen=True, slots=True)
class Slice:
    """What a thread did for a while. `is_wait`: nothing, until something came."""

    track: Track
    kind: str
    name: str
    began: float
    ended: float
    id: str = ""
    peer: str = ""
    size: int = 0
    tensors: str = ""
    is_wait: bool = False


@dataclass(frozen=True, slots=True)
class Arrow:
    """Something that crossed, from when it began to be sent until another thread had it.

    Sending is a part of it: over a slow link that is what takes long.
    """

    way: Way
    name: str
    id: str
    source: Track
    left: float
    target: Track
    came: float
    size: int = 0
    tensors: str = ""
    woke: bool = False
    """whether the thread that got it had waited for it, or began with it"""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A call from the moment it was made until its answer came."""

    worker: str
    name: str
    id: str
    peer: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened on all workers between two moments."""

    workers: list[str]
    seconds: float
    slices: list[Slice]
    arrows: list[Arrow]
    calls: list[InFlight]
    threads: dict[Track, str]
    root: Track
    """the thread that traced"""
    logs: dict[str, Log]
    moved: int = 0
    """arrows whose end came before their beginning, by less than the clocks are known"""

    @property
    def dropped(self) -> int:
        """How many events are missing."""
        return sum(log.dropped for log in self.logs.values())

    @property
    def uncertainty(self) -> float:
        """By how much a time of another machine may be wrong."""
        return max((log.offsets.uncertainty for log in self.logs.values()), default=0.0)


_NAMES = {
    "run": "backward",
    "encode": "encode",
    "decode": "decode",
    "step": "optimizer step",
    "answer": "send the answer",
    "gradients": "send gradients",
    "handed over": "answer later",
}
_INSTANTS = {"start", "end", "begin", "done", "prepared", "answered", "hand over"}
_LEAVES: dict[str, Way] = {
    "call": "call",
    "answer": "answer",
    "gradients": "gradient",
    "begin": "start",
    "done": "end",
    "hand over": "hand over",
}
"""events with which something leaves"""
_COMES: dict[str, Way] = {
    "serve": "call",
    "waited": "answer",
    "answered": "answer",
    "settled": "gradient",
    "run": "start",
    "awaited": "end",
    "handed over": "hand over",
}
"""events that begin or end with something that came"""
_BEGINS = {"serve", "run", "handed over"}
SHORT = 20e-6
"""A wait shorter than this has not waited: what came was there already."""


class _Timed(NamedTuple):
    """An event on its thread, in our time."""

    event: Event
    track: Track
    began: float
    ended: float


def timeline_of(logs: Iterable[Log], began: float, ended: float, root: tuple[str, int]) -> Timeline:
    """The timeline of what happened between two moments of our clock; `root` is our thread."""
    logs = list(logs)
    timed = sorted(
        (each for log in logs for each in _in_our_time(log, began, ended)),
        key=lambda each: (each.began, each.ended, each.event.n),
    )
    numbers: dict[tuple[str, int], Track] = {}
    names: dict[Track, str] = {}
    for log in logs:
        if log.worker == root[0]:
            _number(root, numbers, names, log)
    by_name = {log.worker: log for log in logs}
    tracked = [
        each._replace(track=_number(each.track, numbers, names, by_name[each.track.worker]))
        for each in timed
    ]
    arrows, moved = _arrows(tracked)
    slices = [*_slices(tracked), *_passes(tracked, ended - began)]
    slices.sort(key=lambda one: (one.began, -one.ended))
    return Timeline(
        [log.worker for log in sorted(logs, key=lambda log: log.rank)],
        ended - began,
        slices,
        arrows,
        _in_flight(tracked, ended - began),
        names,
        numbers[root],
        by_name,
        moved,
    )


def _in_our_time(log: Log, began: float, ended: float) -> Iterator[_Timed]:
    here, length = log.offsets.here, ended - began
    for event in log.events:
        first, last = here(event.began) - began, here(event.ended) - began
        if last >= 0 and first <= length:
            track = Track(log.worker, event.thread)
            yield _Timed(event, track, max(0.0, first), min(length, last))


def _number(
    track: tuple[str, int],
    numbers: dict[tuple[str, int], Track],
    names: dict[Track, str],
    log: Log,
) -> Track:
    found = numbers.get(track)
    if found is None:
        count = sum(known.worker == track[0] for known in numbers.values())
        found = numbers[track] = Track(track[0], count + 1)
        names[found] = log.threads.get(track[1], "a thread that has ended")
    return found


def _slices(timed: Sequence[_Timed]) -> Iterator[Slice]:
    functions = _functions(timed)
    for event, track, began, ended in timed:
        what, peer = event.what, event.peer
        if what in _INSTANTS:
            continue
        about = (began, ended, event.id, peer, event.size, event.tensors)
        match what:
            case "waited":
                yield Slice(track, "wait", f"wait for an answer of {peer}", *about, is_wait=True)
            case "settled":
                if ended - began >= SHORT:
                    name = f"wait for gradients of {peer}"
                    yield Slice(track, "wait", name, *about, is_wait=True)
            case "awaited":
                name = f"wait until {peer} is through"
                yield Slice(track, "wait", name, *about, is_wait=True)
            case "call":
                yield Slice(track, "send", f"send {event.about} to {peer}", *about)
            case "serve":
                name = functions.get(event.id) or event.about
                yield Slice(track, "function", name, *about)
            case "span":
                yield Slice(track, "span", event.about, *about)
            case _:
                name = _NAMES.get(what) or f"{what} {event.about}".strip()
                yield Slice(track, what, name, *about)


def _functions(timed: Sequence[_Timed]) -> dict[str, str]:
    """What each call asked for, as its caller named it."""
    return {each.event.id: each.event.about for each in timed if each.event.what == "call"}


def _passes(timed: Sequence[_Timed], length: float) -> Iterator[Slice]:
    """From the first crossing of a pass to its end, on the worker that began it."""
    open_: dict[str, _Timed] = {}
    for each in timed:
        what, id = each.event.what, each.event.id
        if what == "start":
            open_[id] = each
        elif what in ("end", "fail") and id in open_:
            began = open_.pop(id)
            yield Slice(began.track, "pass", "backward", began.began, each.ended, id)
    for id, began in open_.items():
        yield Slice(began.track, "pass", "backward (not over)", began.began, length, id)


def _in_flight(timed: Sequence[_Timed], length: float) -> list[InFlight]:
    """Calls with a future, and those without an answer: others are seen by their waits."""
    over = {(t.track.worker, t.event.id): t.ended for t in timed if t.event.what == "answered"}
    waited = {(t.track.worker, t.event.id) for t in timed if t.event.what == "waited"}
    answered = {t.event.id for t in timed if t.event.what == "answer"}
    found = []
    for event, track, began, _ in [t for t in timed if t.event.what == "call"]:
        key = track.worker, event.id
        if key in over or (key not in waited and event.id not in answered):
            about = (track.worker, event.about, event.id, event.peer)
            found.append(InFlight(*about, began, over.get(key, length)))
    return found


_Left = dict[tuple[Way, str, str], _Timed]
"""what left: by what it is, its id, and the worker that it left for"""


def _arrows(timed: Sequence[_Timed]) -> tuple[list[Arrow], int]:
    """What left and came: the ends of an arrow have the same id on both workers."""
    left: _Left = {}
    for each in timed:
        kind = _LEAVES.get(each.event.what)
        if kind and each.event.id:  # of several, the last: the earlier ones were not answered
            left[kind, each.event.id, each.event.peer] = each
    functions = _functions(timed)
    waited = {(each.track, each.event.id) for each in timed if each.event.what == "waited"}
    seen: set[object] = {(track.worker, id, "answered") for track, id in waited}
    arrows, moved = [], 0
    for each in timed:
        event = each.event
        once = (each.track.worker, event.id, event.what)
        found = _source(each, left)
        if found is None or once in seen:
            continue
        seen.add(once)
        (way, source), began = found, event.what in _BEGINS
        came = each.began if began else each.ended
        if came < source.began:
            came, moved = source.began, moved + 1
        arrows.append(
            Arrow(
                way,
                _name(way, functions.get(event.id, "")),
                event.id,
                source.track,
                source.began,
                each.track,
                came,
                source.event.size,
                source.event.tensors,
                woke=event.what != "answered" and (began or each.ended - each.began >= SHORT),
            )
        )
    return arrows, moved


def _source(each: _Timed, left: _Left) -> tuple[Way, _Timed] | None:
    """What it came from, if that was recorded."""
    event, way = each.event, _COMES.get(each.event.what)
    if way is None:
        return None
    source = left.get((way, event.id, each.track.worker))
    if event.what == "run" and event.about:  # it waited until there were gradients
        first = left.get(("gradient", event.about, each.track.worker))
        if first is not None and (source is None or first.began > source.began):
            return "gradient", first
    return None if source is None else (way, source)


def _name(way: Way, function: str) -> str:
    match way:
        case "call":
            return f"call of {function}"
        case "answer":
            return f"answer of {function}"
        case "gradient":
            return "gradient"
        case "start":
            return "start of the backward"
        case "end":
            return "end of the backward"
        case "hand over":
            return "to another thread"
