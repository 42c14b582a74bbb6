"""A graph as SVG: a lane for each worker, boxes and arrows, readable on light and dark ground.

It stands for itself: no script, no font and nothing else is loaded. The rules of its style name the
class of the picture, as in a page they apply to the whole page.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from gradwire.seeing.graph_layout import (
    PADDING,
    Box,
    Drawing,
    LabelledArrow,
    Point,
    Size,
    Way,
    columns_of,
    lay_out,
)
from gradwire.seeing.graph_model import (
    EdgeKind,
    GraphEdge,
    GraphPart,
    PartKind,
    counted,
    said_of_line,
    said_of_part,
    said_of_tensors,
    sized,
)
from gradwire.seeing.graph_text import names_of, title_of

if TYPE_CHECKING:
    from gradwire.seeing.graph_picture import Graph

LETTER = 6.7
"""the width of a letter of 11 px: fonts differ, so it is more than most need"""
_BOLD_LETTER = 7.3
LINE = 15
_TITLE, _NOTE, _MARGIN, _HEAD = 42, 18, 16, 9
_LABEL_PADDING = 14
_MOST_LETTERS = 40
_COLORS = ("#2563eb", "#0d9488", "#9333ea", "#c2700a", "#db2777", "#4d7c0f")
_STYLE = """
.gradwire-graph { --ground: #ffffff; --lane: #f4f6f8; --box: #ffffff; --text: #1f2933;
  --soft: #667085; --arrow: #556070; --grey: #a3acb8; --cut: #d92d20;
  font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
@media (prefers-color-scheme: dark) { .gradwire-graph { --ground: #0d1117; --lane: #161b22;
  --box: #1d2530; --text: #e6edf3; --soft: #93a0af; --arrow: #9aa7b5; --grey: #5d6875;
  --cut: #ff7b72 } }
.gradwire-graph text { fill: var(--text) }
.gradwire-graph .ground { fill: var(--ground) }
.gradwire-graph .lane rect { fill: var(--lane) }
.gradwire-graph .title { font-size: 14px; font-weight: 600 }
.gradwire-graph .worker { font-size: 13px; font-weight: 600 }
.gradwire-graph .soft { fill: var(--soft) }
.gradwire-graph .part rect { fill: var(--box); stroke: var(--lane-color); stroke-width: 1.2 }
.gradwire-graph .part.root rect { stroke-width: 2.6 }
.gradwire-graph .part .first, .gradwire-graph .of-root { font-weight: 600 }
.gradwire-graph .edge path { fill: none; stroke: var(--arrow); stroke-width: 1.4 }
.gradwire-graph .edge.inside path { stroke: var(--lane-color); stroke-width: 1 }
.gradwire-graph .edge .head { fill: var(--arrow); stroke: none }
.gradwire-graph .edge.inside .head { fill: var(--lane-color); stroke: none }
.gradwire-graph .edge.grey path, .gradwire-graph .part.grey rect { stroke: var(--grey) }
.gradwire-graph .edge.grey .head { fill: var(--grey); stroke: none }
.gradwire-graph .grey text { fill: var(--grey) }
.gradwire-graph .part.unknown rect { fill: none; stroke-dasharray: 4 3 }
.gradwire-graph .edge.cut path, .gradwire-graph .part.cut rect { stroke: var(--cut) }
.gradwire-graph .edge.cut path { stroke-dasharray: 5 4 }
.gradwire-graph .edge.cut .head, .gradwire-graph .cut text, .gradwire-graph .bad {
  fill: var(--cut); stroke: none }
"""


def svg_of(graph: Graph) -> str:
    """The whole picture."""
    layout = _laid_out(graph)
    notes = _notes(graph)
    texts = [(title_of(graph), LETTER * 14 / 11), *((note, LETTER) for note in notes)]
    widest = max(len(text) * letter for text, letter in texts)
    width = max(layout.width, widest) + 2 * _MARGIN
    below = _TITLE + layout.height
    height = below + (len(notes) * _NOTE + 10 if notes else 0) + _MARGIN
    names = names_of(graph)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gradwire-graph" width="{_n(width)}" '
        f'height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}" role="img">',
        f"<title>{escape(title_of(graph))}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{_n(width)}" height="{_n(height)}" rx="8"/>',
        _text(_MARGIN, 26, title_of(graph), "title"),
        f'<g transform="translate({_MARGIN} {_TITLE})">',
        *_lanes(graph, layout, width - 2 * _MARGIN),
        *(_edge(graph, edge, way) for edge, way in zip(graph.edges, layout.ways, strict=True)),
        *(
            _part(graph, part, box, name)
            for part, box, name in zip(graph.parts, layout.boxes, names, strict=True)
        ),
        "</g>",
        *(_text(_MARGIN, below + 22 + n * _NOTE, note, "soft") for n, note in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _laid_out(graph: Graph) -> Drawing:
    lane_of = {worker: n for n, worker in enumerate(graph.workers)}
    arrows = [(edge.source, edge.target) for edge in graph.edges]
    columns = columns_of(len(graph.parts), [(s, t) for s, t in arrows])
    beside = {n for edge in graph.cuts for n in (edge.source, edge.target)}
    last = max((c for n, c in enumerate(columns) if n not in beside), default=-1)
    for edge in graph.cuts:  # they belong to no column: right of everything
        columns[edge.source], columns[edge.target] = last + 1, last + 2
    widest = max(len(worker) for worker in graph.workers)
    silent = max((len(_silence(graph, worker)) for worker in graph.workers), default=0)
    return lay_out(
        [lane_of[part.worker] for part in graph.parts],
        columns,
        [_size_of(part) for part in graph.parts],
        [LabelledArrow(e.source, e.target, _label_width(e)) for e in graph.edges],
        header=max(widest * LETTER * 13 / 11, silent * LETTER) + 30,
        lane_count=len(graph.workers),
    )


def _size_of(part: GraphPart) -> Size:
    said = [_short(line) for line in said_of_part(part)]
    return Size(max(map(len, said)) * _BOLD_LETTER + 20, len(said) * LINE + 12)


def _label_width(edge: GraphEdge) -> float:
    widest = max(map(len, _labels(edge)))
    return widest * LETTER + _LABEL_PADDING if widest else 0.0


def _labels(edge: GraphEdge) -> tuple[str, str]:
    """What stands above the beginning of an arrow, and below."""
    match edge.kind:
        case EdgeKind.CROSSING:
            return _short(said_of_tensors(edge)), f"{edge.name}  {sized(edge.bytes)}"
        case EdgeKind.CUT:
            times = f", {edge.times} times" if edge.times > 1 else ""
            return _short(said_of_line(edge.line) + times), _short(edge.what)
        case EdgeKind.INSIDE:
            return "", ""


def _lanes(graph: Graph, layout: Drawing, width: float) -> list[str]:
    lines = []
    for n, (worker, box) in enumerate(zip(graph.workers, layout.lanes, strict=True)):
        color, middle = _COLORS[n % len(_COLORS)], box.y + box.height / 2
        silence = _silence(graph, worker)
        lines += [
            f'<g class="lane" data-worker="{escape(worker)}">',
            f'<rect x="0" y="{_n(box.y)}" width="{_n(width)}" height="{_n(box.height - 4)}" '
            'rx="5"/>',
            f'<rect x="0" y="{_n(box.y)}" width="4" height="{_n(box.height - 4)}" rx="2" '
            f'style="fill: {color}"/>',
            _text(PADDING, middle - 2 if silence else middle + 3, worker, "worker"),
            *([_text(PADDING, middle + 14, silence, "bad")] if silence else []),
            "</g>",
        ]
    return lines


def _silence(graph: Graph, worker: str) -> str:
    return "no answer" if any(name == worker for name, _ in graph.silent) else ""


def _part(graph: Graph, part: GraphPart, box: Box, name: str) -> str:
    said = [_short(line) for line in said_of_part(part)]
    kinds = ["part", *(["root"] if part.roots else []), *_kinds_of_part(part)]
    top = box.y + (box.height - len(said) * LINE) / 2 + 11
    styles = ["first", *["soft"] * (len(said) - 1)]
    for n in range(len(part.roots)):
        styles[-1 - n] = "of-root"
    lines = [
        f'<g class="{" ".join(kinds)}" style="--lane-color: {_color(graph, part.worker)}">',
        f"<title>{escape(_tip_of_part(part, name))}</title>",
        f'<rect x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" '
        f'height="{_n(box.height)}" rx="5"/>',
        *(
            _text(box.x + 10, top + n * LINE, line, style)
            for n, (line, style) in enumerate(zip(said, styles, strict=True))
        ),
        "</g>",
    ]
    return "\n".join(lines)


def _kinds_of_part(part: GraphPart) -> list[str]:
    kinds = [] if part.is_reached else ["grey"]
    if part.kind is PartKind.CUT:
        return ["cut"]
    return kinds if part.kind is PartKind.LOCAL else [*kinds, "unknown"]


def _tip_of_part(part: GraphPart, name: str) -> str:
    lines = [f"{name}: {', '.join(said_of_part(part))}"]
    lines += [f"{count} x {operator}" for operator, count in part.operators]
    if part.unknown:
        packed = counted(part.unknown, "saved tensor")
        lines.append(f"the size of {packed} is not known: packed by hooks, or in use by a backward")
    if not part.is_reached:
        lines.append("the roots do not depend on it")
    return "\n".join(lines)


def _edge(graph: Graph, edge: GraphEdge, way: Way) -> str:
    above, below = _labels(edge)
    start, end = way.points[0], way.points[-1]
    grey = "" if edge.is_reached else " grey"
    color = _color(graph, graph.parts[edge.source].worker)
    head = f"M{_p(end)} l{-_HEAD} -4 v8 z"
    lines = [
        f'<g class="edge {edge.kind.value}{grey}" style="--lane-color: {color}">',
        f"<title>{escape(_tip_of_edge(graph, edge))}</title>",
        f'<path d="{_path(way)}"/>',
        f'<path class="head" d="{head}"/>',
        *([_text(start.x + 8, start.y - 5, above, "first")] if above else []),
        *([_text(start.x + 8, start.y + 13, below, "soft")] if below else []),
        "</g>",
    ]
    return "\n".join(lines)


def _path(way: Way) -> str:
    """Straight, then a curve, and so on; the last curve ends behind the head of the arrow."""
    *others, last = way.points
    points = [*others, Point(last.x - _HEAD + 2, last.y)]
    parts = [f"M{_p(points[0])}"]
    for n, point in enumerate(points[1:], 1):
        if n % 2:
            parts.append(f"H{_n(point.x)}")
        else:
            before = points[n - 1]
            middle = (before.x + point.x) / 2
            parts.append(f"C{_n(middle)} {_n(before.y)} {_n(middle)} {_n(point.y)} {_p(point)}")
    return " ".join(parts)


def _tip_of_edge(graph: Graph, edge: GraphEdge) -> str:
    source, target = graph.parts[edge.source].worker, graph.parts[edge.target].worker
    match edge.kind:
        case EdgeKind.INSIDE:
            return f"used again on {source}"
        case EdgeKind.CUT:
            times = "" if edge.times == 1 else f", {edge.times} times"
            lost = f"{counted(edge.count, 'tensor')} lost the graph in {edge.what}{times}"
            return f"{source} to {target}: {lost}\n{said_of_line(edge.line, 2)}".rstrip()
        case EdgeKind.CROSSING:
            line = said_of_line(edge.line, 2)
            sent = f"sent by {line}" if line else "the result of a call"
            more = f", and {edge.count - len(edge.tensors)} more"
            shapes = ", ".join(edge.tensors) + (more if edge.count > len(edge.tensors) else "")
            return f"{edge.name}, {source} to {target}: {shapes}\n{sized(edge.bytes)}, {sent}"


def _notes(graph: Graph) -> list[str]:
    """What stands below the picture."""
    notes = [f"{worker}: {why}" for worker, why in graph.silent]
    if graph.cuts:
        notes.append("red: crossed without a graph, so no gradient comes back")
    if not all(part.is_reached for part in graph.parts):
        notes.append("grey: recorded, but the roots do not depend on it")
    return [*notes, *graph.left_out]


def _color(graph: Graph, worker: str) -> str:
    return _COLORS[graph.workers.index(worker) % len(_COLORS)]


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>'


def _n(value: float) -> str:
    return f"{round(value, 1):g}"


def _p(point: Point) -> str:
    return f"{_n(point.x)} {_n(point.y)}"
