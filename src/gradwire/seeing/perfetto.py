"""A timeline as a file that Perfetto opens, and every other viewer of Chrome's trace format. Pure.

A process is a worker, by its rank. Slices of one thread nest; what overlaps (calls in flight) is
asynchronous. Arrows bind to the slices that they end in. The critical path is a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradwire.seeing.critical_path import Part
from gradwire.seeing.timeline import Arrow, InFlight, Slice, Timeline, Track

_PATH = 1 << 20
"""The process number of the critical path: above every rank."""
Row = dict[str, Any]


def perfetto(timeline: Timeline, path: Sequence[Part]) -> dict[str, object]:
    """The content of the file, as plain data."""
    ranks = {worker: timeline.logs[worker].rank for worker in timeline.workers}
    rows = [*_names(timeline, ranks)]
    nested, loose = _nesting(timeline.slices)
    rows += [_slice(one, ranks) for one in nested]
    for n, one in enumerate(loose):
        rows += _loose(one, ranks, n)
    for call in timeline.calls:
        rows += _call(call, ranks)
    for n, arrow in enumerate(timeline.arrows, 1):
        rows += _arrow(arrow, ranks, n)
    rows += [_part(part) for part in path]
    return {
        "displayTimeUnit": "ns",
        "otherData": {
            "written by": "gradwire",
            "seconds": timeline.seconds,
            "clock uncertainty in seconds": timeline.uncertainty,
            "dropped events": timeline.dropped,
            "arrows moved within the uncertainty": timeline.moved,
        },
        "traceEvents": rows,
    }


def _names(timeline: Timeline, ranks: dict[str, int]) -> Iterator[Row]:
    def meta(kind: str, pid: int, tid: int, **about: object) -> Row:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": about}

    yield meta("process_name", _PATH, 0, name="critical path")
    yield meta("process_sort_index", _PATH, 0, sort_index=-1)
    yield meta("thread_name", _PATH, 1, name="of the step")
    for worker, rank in ranks.items():
        log = timeline.logs[worker]
        dropped = f", {log.dropped} events dropped" if log.dropped else ""
        about = f" ({log.about}{dropped})" if log.about else dropped
        yield meta("process_name", rank, 0, name=f"{worker}{about}")
        yield meta("process_sort_index", rank, 0, sort_index=rank)
    for track, name in timeline.threads.items():
        yield meta("thread_name", *_ids(track, ranks), name=name)


def _nesting(slices: Sequence[Slice]) -> tuple[list[Slice], list[Slice]]:
    """Those that nest on their thread, and those that do not, as of coroutines that take turns."""
    open_: dict[Track, list[Slice]] = {}
    nested, loose = [], []
    for one in slices:  # in the order in which they began, the longer first
        stack = open_.setdefault(one.track, [])
        while stack and stack[-1].ended <= one.began:
            stack.pop()
        if stack and one.ended > stack[-1].ended:
            loose.append(one)
            continue
        stack.append(one)
        nested.append(one)
    return nested, loose


def _ids(track: Track, ranks: dict[str, int]) -> tuple[int, int]:
    """The numbers of process and thread. Viewers take a thread with the number of its process for
    the main one, so none has that.
    """
    rank = ranks[track.worker]
    return rank, (rank + 1) * 10_000 + track.thread


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(one: Slice, ranks: dict[str, int]) -> Row:
    began, (pid, tid) = _us(one.began), _ids(one.track, ranks)
    about = {"id": one.id, "peer": one.peer, "bytes": one.size, "tensors": one.tensors}
    return {
        "ph": "X",
        "name": one.name,
        "cat": one.kind,
        "pid": pid,
        "tid": tid,
        "ts": began,
        "dur": round(_us(one.ended) - began, 3),
        "args": {name: value for name, value in about.items() if value},
    }


def _pair(
    name: str, category: str, id: str, pid: int, tid: int, began: float, ended: float
) -> tuple[Row, Row]:
    about = {"name": name, "cat": category, "id2": {"local": id}, "pid": pid, "tid": tid}
    return {**about, "ph": "b", "ts": _us(began)}, {**about, "ph": "e", "ts": _us(ended)}


def _loose(one: Slice, ranks: dict[str, int], n: int) -> tuple[Row, Row]:
    pid, tid = _ids(one.track, ranks)
    return _pair(one.name, "overlapping", f"o{n}", pid, tid, one.began, one.ended)


def _call(call: InFlight, ranks: dict[str, int]) -> tuple[Row, Row]:
    began, ended = _pair(call.name, "calls", call.id, ranks[call.worker], 0, call.began, call.ended)
    return {**began, "args": {"worker": call.peer, "id": call.id}}, ended


def _arrow(arrow: Arrow, ranks: dict[str, int], n: int) -> tuple[Row, Row]:
    def end(ph: str, track: Track, at: float) -> Row:
        pid, tid = _ids(track, ranks)
        about = {"ph": ph, "name": arrow.name, "cat": arrow.way, "id": n, "pid": pid}
        return {**about, "tid": tid, "ts": _us(at)}

    came = end("f", arrow.target, arrow.came)
    return end("s", arrow.source, arrow.left), {**came, "bp": "e"}


def _part(part: Part) -> Row:
    where, arrow = part.track.worker, part.arrow
    if arrow is not None:
        where = f"{arrow.source.worker} > {arrow.target.worker}"
    began = _us(part.began)
    length = round(_us(part.ended) - began, 3)
    about = {"ph": "X", "name": f"{where}: {part.name}", "cat": "critical path"}
    return {**about, "pid": _PATH, "tid": 1, "ts": began, "dur": length}
