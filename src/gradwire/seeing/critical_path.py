"""The critical path of a timeline: what the step took its time for, over threads and wires. Pure.

It is found from the end. A thread that was woken by something that came had nothing to do before:
the path goes on where that left. Until then it is the thread's own work. So the parts follow one
another without a gap, their lengths sum to the step, and no chain of causes can be longer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gradwire.seeing.timeline import Arrow, Slice, Timeline, Track


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the path: the work of a thread, or what crossed if there is an arrow."""

    track: Track
    name: str
    began: float
    ended: float
    arrow: Arrow | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


def critical_path(timeline: Timeline) -> list[Part]:
    """The parts, in the order of time."""
    woken: dict[Track, list[Arrow]] = defaultdict(list)
    for arrow in timeline.arrows:
        if arrow.woke and arrow.left < arrow.came:
            woken[arrow.target].append(arrow)
    for arrows in woken.values():
        arrows.sort(key=_came)
    slices: dict[Track, list[Slice]] = defaultdict(list)
    for one in timeline.slices:
        slices[one.track].append(one)
    did = defaultdict(list, {track: innermost(each) for track, each in slices.items()})
    path: list[Part] = []
    track, now = timeline.root, timeline.seconds
    while now > 0.0:
        at = bisect_right(woken[track], now, key=_came)
        last = woken[track][at - 1] if at else None
        began = 0.0 if last is None else last.came
        path += reversed(list(_work(track, did[track], began, now, timeline.root)))
        if last is None:
            break
        path.append(Part(track, last.name, last.left, last.came, last))
        track, now = last.source, last.left
    return path[::-1]


def _came(arrow: Arrow) -> float:
    return arrow.came


@dataclass(frozen=True, slots=True)
class Stretch:
    """A thread did this, and nothing inside of it that has a name of its own."""

    began: float
    ended: float
    name: str


def innermost(slices: Iterable[Slice]) -> list[Stretch]:
    """What one thread did at each moment; `slices` are in the order in which they began."""
    found: list[Stretch] = []
    open_: list[Slice] = []
    now = 0.0

    def go_to(moment: float) -> None:
        nonlocal now
        while open_ and open_[-1].ended <= moment:
            top = open_.pop()
            if top.ended > now:
                found.append(Stretch(now, top.ended, top.name))
                now = top.ended
        if open_ and moment > now:
            found.append(Stretch(now, moment, open_[-1].name))
        now = max(now, moment)

    for one in slices:
        go_to(one.began)
        open_.append(one)
    go_to(math.inf)
    return found


def _work(
    track: Track, stretches: list[Stretch], began: float, ended: float, root: Track
) -> Iterator[Part]:
    """What a thread did in this time."""
    unnamed, now = "python between calls" if track == root else "between messages", began
    first = bisect_right(stretches, began, key=_ended)
    for n in range(first, len(stretches)):
        one = stretches[n]
        if one.began >= ended:
            break
        if one.began > now:
            yield Part(track, unnamed, now, one.began)
            now = one.began
        until = min(one.ended, ended)
        yield Part(track, one.name, now, until)
        now = until
    if now < ended:
        yield Part(track, unnamed, now, ended)


def _ended(stretch: Stretch) -> float:
    return stretch.ended
