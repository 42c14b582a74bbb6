"""Where everything in the picture of a graph stands: lanes, boxes, and the ways of arrows.

Pure. A lane for each worker, columns from left to right, so that each arrow leads to the right. A
column has a zone of boxes, a zone of labels and a zone of curves:

    | box |-- label --\\
    | box |-- label ---\\--> | box |

A label stands on the straight beginning of its arrow, beside its box. An arrow over several columns
gets a row of its own in each column between. So no arrow crosses a box or a label, whatever the
graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, final

GAP, PADDING = 14, 14
"""between the boxes of a lane, and around them"""
ROW = 12
"""the height of an arrow that passes"""
PORT, LABEL = 14, 32
"""the height of an arrow that arrives, and of one that leaves with its label"""
_CURVE, _CURVE_EACH, _CURVE_MOST = 44, 3, 110
_SWEEPS = 6


class Size(NamedTuple):
    """Of a text."""

    width: float
    height: float


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


_NOWHERE = Box(0, 0, 0, 0)


class Point(NamedTuple):
    """A place."""

    x: float
    y: float


class Way(NamedTuple):
    """The way of an arrow: straight from each even point to the next one, then a curve."""

    points: list[Point]


class Drawing(NamedTuple):
    """Where everything stands, below and right of the origin."""

    boxes: list[Box]
    ways: list[Way]
    lanes: list[Box]
    width: float
    height: float


class LabelledArrow(NamedTuple):
    """From which part to which, with a label of this width."""

    source: int
    target: int
    label: float


def columns_of(count: int, arrows: Sequence[tuple[int, int]]) -> list[int]:
    """The column of each part: right of all that it uses, and near to what uses it.

    Parts in a cycle, which no correct worker reports, come last.
    """
    uses = [0] * count
    users: list[list[int]] = [[] for _ in range(count)]
    for source, target in arrows:
        users[source].append(target)
        uses[target] += 1
    sources = [part for part in range(count) if not uses[part]]
    columns, ready = [0] * count, sources.copy()
    for part in ready:  # it grows meanwhile
        for user in users[part]:
            columns[user] = max(columns[user], columns[part] + 1)
            uses[user] -= 1
            if not uses[user]:
                ready.append(user)
    last = max(columns, default=0)
    for part in range(count):
        if uses[part] > 0:
            columns[part] = last + 1
    for part in sources:
        if users[part]:
            columns[part] = max(0, min(columns[user] for user in users[part]) - 1)
    return columns


@final
@dataclass(slots=True, eq=False)
class _Slot:
    """A place in a lane and a column: of a part, or of an arrow that passes."""

    lane: int
    column: int
    height: float
    part: int = -1
    before: list[_Slot] = field(default_factory=list)
    behind: list[_Slot] = field(default_factory=list)
    rank: float = 0.0
    """where it stands, compared with others: its lane, and a fraction for its row"""
    box: Box = _NOWHERE

    @property
    def middle(self) -> float:
        return self.box.y + self.box.height / 2


_Stacks = Mapping[tuple[int, int], list[_Slot]]
"""by lane and column"""


def lay_out(
    lanes: Sequence[int],
    columns: Sequence[int],
    sizes: Sequence[Size],
    arrows: Sequence[LabelledArrow],
    *,
    header: float,
    lane_count: int,
) -> Drawing:
    """Place parts with these lanes, columns and sizes, right of a header."""
    count = max(columns, default=0) + 1
    leaving, arriving = _ends(len(sizes), arrows)
    slots = [
        _Slot(lane, column, max(size.height, LABEL * leaving[n], PORT * arriving[n]), n)
        for n, (lane, column, size) in enumerate(zip(lanes, columns, sizes, strict=True))
    ]
    ways = [_slots_between(slots[arrow.source], slots[arrow.target]) for arrow in arrows]
    stacks: dict[tuple[int, int], list[_Slot]] = {}
    for slot in [*slots, *(slot for way in ways for slot in way[1:-1])]:
        stacks.setdefault((slot.lane, slot.column), []).append(slot)
    _sort(stacks)
    lefts, widths, straight, right = _across(count, columns, sizes, arrows, header)
    placed = _down(stacks, lefts, widths, lane_count, right)
    made = _ways(ways, straight)
    bottom = placed[-1].y + placed[-1].height if placed else 0.0
    return Drawing([slot.box for slot in slots], made, placed, right, bottom)


def _ends(count: int, arrows: Sequence[LabelledArrow]) -> tuple[list[int], list[int]]:
    leaving, arriving = [0] * count, [0] * count
    for arrow in arrows:
        leaving[arrow.source] += 1
        arriving[arrow.target] += 1
    return leaving, arriving


def _slots_between(source: _Slot, target: _Slot) -> list[_Slot]:
    """The slots of an arrow, with both ends; those between are in the lane that it leaves."""
    between = [_Slot(source.lane, c, ROW) for c in range(source.column + 1, target.column)]
    way = [source, *between, target]
    for one, following in pairwise(way):
        one.behind.append(following)
        following.before.append(one)
    return way


def _sort(stacks: _Stacks) -> None:
    """Order each stack by the middle of what it is connected with, from left and from right."""
    columns = sorted({column for _, column in stacks})
    _rank(stacks)
    for sweep in range(_SWEEPS):
        is_forward = sweep % 2 == 0
        for column in columns if is_forward else reversed(columns):
            for (_, where), stack in stacks.items():
                if where == column:
                    stack.sort(key=_middle_before if is_forward else _middle_behind)
            _rank(stacks)


def _rank(stacks: _Stacks) -> None:
    for stack in stacks.values():
        for row, slot in enumerate(stack):
            slot.rank = slot.lane + (row + 0.5) / len(stack)


def _middle_before(slot: _Slot) -> float:
    return _middle([each.rank for each in slot.before], slot.rank)


def _middle_behind(slot: _Slot) -> float:
    return _middle([each.rank for each in slot.behind], slot.rank)


def _middle(ranks: list[float], otherwise: float) -> float:
    return sum(ranks) / len(ranks) if ranks else otherwise


def _across(
    count: int,
    columns: Sequence[int],
    sizes: Sequence[Size],
    arrows: Sequence[LabelledArrow],
    header: float,
) -> tuple[list[float], list[float], list[float], float]:
    """Of each column: its left, the width of boxes, where labels end. And the right of all."""
    widths, labels, leaving = [0.0] * count, [0.0] * count, [0] * count
    for column, size in zip(columns, sizes, strict=True):
        widths[column] = max(widths[column], size.width)
    for arrow in arrows:
        column = columns[arrow.source]
        labels[column] = max(labels[column], arrow.label)
        leaving[column] += 1
    lefts, straight, x = [], [], header + PADDING
    for width, label, arrows_here in zip(widths, labels, leaving, strict=True):
        lefts.append(x)
        straight.append(x + width + label)
        curve = min(_CURVE + _CURVE_EACH * arrows_here, _CURVE_MOST)
        x = straight[-1] + (curve if arrows_here else PADDING)
    return lefts, widths, straight, x


def _down(
    stacks: _Stacks,
    lefts: Sequence[float],
    widths: Sequence[float],
    lane_count: int,
    right: float,
) -> list[Box]:
    """Set the box of each slot; returns the lanes."""
    placed, y = [], 0.0
    for lane in range(lane_count):
        own = {column: stack for (at, column), stack in stacks.items() if at == lane}
        heights = {column: _height(stack) for column, stack in own.items()}
        inner = max(heights.values(), default=2 * ROW)
        for column, stack in own.items():
            top = y + PADDING + (inner - heights[column]) / 2
            for slot in stack:
                slot.box = Box(lefts[column], top, widths[column], slot.height)
                top += slot.height + GAP
        height = inner + 2 * PADDING
        placed.append(Box(0, y, right, height))
        y += height
    return placed


def _height(stack: Sequence[_Slot]) -> float:
    return sum(slot.height for slot in stack) + GAP * (len(stack) - 1)


def _ways(ways: Sequence[list[_Slot]], straight: Sequence[float]) -> list[Way]:
    leaves = _ports([(way[0], way[1].middle, n) for n, way in enumerate(ways)])
    arrives = _ports([(way[-1], way[-2].middle, n) for n, way in enumerate(ways)])
    made = []
    for n, (source, *between, target) in enumerate(ways):
        box = source.box
        points = [Point(box.x + box.width, leaves[n]), Point(straight[source.column], leaves[n])]
        for slot in between:
            points += [Point(slot.box.x, slot.middle), Point(straight[slot.column], slot.middle)]
        points.append(Point(target.box.x, arrives[n]))
        made.append(Way(points))
    return made


def _ports(ends: list[tuple[_Slot, float, int]]) -> dict[int, float]:
    """The height at which each arrow touches its box: in the order of where they lead."""
    by_slot: dict[int, list[tuple[float, int]]] = {}
    boxes = {}
    for slot, towards, arrow in ends:
        by_slot.setdefault(id(slot), []).append((towards, arrow))
        boxes[id(slot)] = slot.box
    heights = {}
    for key, found in by_slot.items():
        box = boxes[key]
        for place, (_, arrow) in enumerate(sorted(found)):
            heights[arrow] = box.y + box.height * (place + 0.5) / len(found)
    return heights
