"""Where the time of a step went, in about ten lines of text. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.seeing.critical_path import Part
from gradwire.seeing.timeline import Arrow, Slice, Timeline

_ROWS, _EDGES, _IDLE = 6, 3, 4
_LEAST_SHARE = 0.005
_IDLE_SHARE = 0.25


class _Row(NamedTuple):
    where: str
    what: str


def summary(timeline: Timeline, path: Sequence[Part], file: str = "") -> str:
    """The text."""
    lines = [_head(timeline, file)]
    lines += _path_lines(timeline, path)
    if edges := _edges(timeline):
        lines.append(f" largest crossings: {'; '.join(edges)}")
    if idle := _idle(timeline):
        lines.append(f" waits not on the path: {', '.join(idle)}")
    if timeline.dropped:
        lost = [f"{name} {log.dropped}" for name, log in timeline.logs.items() if log.dropped]
        lines.append(f" MISSING EVENTS, as there were too many: {', '.join(lost)}")
    if timeline.moved:
        lines.append(f" {timeline.moved} arrows were moved, within what the clocks are known")
    return "\n".join(lines)


def _head(timeline: Timeline, file: str) -> str:
    sure = timeline.uncertainty
    clock = f"clocks known to ±{_time(sure)}" if sure else "one clock"
    count = len(timeline.workers)
    head = f"{_time(timeline.seconds)} over {count} worker{'s' * (count != 1)} ({clock})"
    return f"{head}    trace: {file}, open it at ui.perfetto.dev" if file else head


def _path_lines(timeline: Timeline, path: Sequence[Part]) -> list[str]:
    took: dict[_Row, float] = defaultdict(float)
    for part in path:
        took[_row(timeline, part)] += part.seconds
    rows = sorted(took.items(), key=lambda row: -row[1])
    shown = [row for row in rows[:_ROWS] if row[1] >= _LEAST_SHARE * timeline.seconds]
    rest = sum(seconds for _, seconds in rows[len(shown) :])
    if len(rows) > len(shown):
        shown.append((_Row("", f"{len(rows) - len(shown)} more"), rest))
    width = max((len(row.where) for row, _ in shown), default=0)
    return [
        f"{100 * seconds / timeline.seconds:3.0f} % {_time(seconds):>9}  "
        f"{row.where:<{width}}  {row.what}".rstrip()
        for row, seconds in shown
    ]


def _row(timeline: Timeline, part: Part) -> _Row:
    arrow = part.arrow
    if arrow is None:
        return _Row(part.track.worker, part.name)
    source, target = arrow.source.worker, arrow.target.worker
    return _Row(f"{source} > {target}", f"{arrow.name}{_carried(timeline, arrow)}")


def _carried(timeline: Timeline, arrow: Arrow) -> str:
    way = timeline.logs[arrow.source.worker].ways.get(arrow.target.worker, "")
    parts = [arrow.tensors, size_text(arrow.size) if arrow.tensors else "", way]
    return "".join(f", {part}" for part in parts if part)


def _edges(timeline: Timeline) -> list[str]:
    """What carried most, of the same name and shape together."""
    sums: dict[tuple[str, str, str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for arrow in timeline.arrows:
        if arrow.tensors:
            key = arrow.source.worker, arrow.target.worker, arrow.name, arrow.tensors
            count, size = sums[key]
            sums[key] = count + 1, size + arrow.size
    largest = sorted(sums.items(), key=lambda each: -each[1][1])[:_EDGES]
    return [
        f"{source} > {target} {name} {tensors} {size_text(size)}{f' in {n}' if n > 1 else ''}"
        for (source, target, name, tensors), (n, size) in largest
    ]


def _idle(timeline: Timeline) -> list[str]:
    idle = {}
    for worker in timeline.workers:
        busy = _busy([s for s in timeline.slices if s.track.worker == worker])
        if worker == timeline.root.worker:  # between its calls it computes
            waits = [s for s in timeline.slices if s.track == timeline.root and s.is_wait]
            busy = timeline.seconds - _covered((s.began, s.ended) for s in waits)
        idle[worker] = timeline.seconds - busy
    found = sorted(idle.items(), key=lambda each: -each[1])[:_IDLE]
    return [
        f"{worker} idle {_time(seconds)} ({100 * seconds / timeline.seconds:.0f} %)"
        for worker, seconds in found
        if seconds >= _IDLE_SHARE * timeline.seconds
    ]


def _busy(slices: Sequence[Slice]) -> float:
    """How long some thread did something and did not wait."""
    threads: dict[object, list[Slice]] = defaultdict(list)
    for one in slices:
        threads[one.track].append(one)
    working: list[tuple[float, float]] = []
    for each in threads.values():
        waits = sorted((s.began, s.ended) for s in each if s.is_wait)
        for work in each:
            if not work.is_wait:
                working += _without((work.began, work.ended), waits)
    return _covered(working)


def _without(
    span: tuple[float, float], waits: Sequence[tuple[float, float]]
) -> Iterable[tuple[float, float]]:
    now, ended = span
    for first, last in waits:
        if last <= now or first >= ended:
            continue
        if first > now:
            yield now, first
        now = max(now, last)
    if now < ended:
        yield now, ended


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of these."""
    total, until = 0.0, 0.0
    for first, last in sorted(spans):
        if last > until:
            total += last - max(first, until)
            until = last
    return total


def _time(seconds: float) -> str:
    """A time with its unit.

    >>> _time(0.0123), _time(12.3), _time(4.5e-5)
    ('12.3 ms', '12.3 s', '45.0 us')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def size_text(size: int) -> str:
    """A number of bytes with its unit.

    >>> size_text(512), size_text(1536), size_text(1 << 30)
    ('512 B', '1.5 KiB', '1.0 GiB')
    """
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
