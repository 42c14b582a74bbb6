"""A graph as text for a terminal, and in the language of graphviz."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gradwire.seeing.graph_layout import columns_of
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

if TYPE_CHECKING:
    from gradwire.seeing.graph_picture import Graph


def title_of(graph: Graph) -> str:
    """The whole in one line."""
    crossings = [edge for edge in graph.crossings if edge.is_reached]
    roots = sum(len(part.roots) for part in graph.parts)
    size = sized(sum(edge.bytes for edge in crossings))
    over = counted(len(graph.workers), "worker")
    edges = f"{counted(len(crossings), 'edge')} of {size}" if crossings else "no edges"
    return f"{counted(roots, 'root')} on {graph.drawn_by}, {over}, {edges}"


def names_of(graph: Graph) -> list[str]:
    """A name for each part: of its worker, and its place there from left to right."""
    ends = [(edge.source, edge.target) for edge in graph.edges]
    columns, counts = columns_of(len(graph.parts), ends), dict.fromkeys(graph.workers, 0)
    names = [""] * len(graph.parts)
    for n in sorted(range(len(names)), key=columns.__getitem__):
        part = graph.parts[n]
        if part.kind is PartKind.CUT:
            names[n] = part.worker
        else:
            counts[part.worker] += 1
            names[n] = f"{part.worker}.{counts[part.worker]}"
    return names


def text_of(graph: Graph) -> str:
    """Lane by lane what lies there, then what crosses."""
    names = names_of(graph)
    lines = [title_of(graph)]
    for worker in graph.workers:
        lines += ["", worker, *_lane(graph, worker, names)]
    lines += _section("edges", [_edge(e, names) for e in graph.crossings if e.is_reached])
    lines += _section("not reached", [_edge(e, names) for e in graph.crossings if not e.is_reached])
    lines += _section("cut: crossed without a graph", [_cut(e, names) for e in graph.cuts])
    lines += _section("left out", [[text] for text in graph.left_out])
    return "\n".join(lines)


def _lane(graph: Graph, worker: str, names: list[str]) -> list[str]:
    rows = [
        [names[n], ", ".join(said_of_part(part)) + ("" if part.is_reached else " (not reached)")]
        for n, part in enumerate(graph.parts)
        if part.worker == worker and part.kind is not PartKind.CUT
    ]
    why = [f"  {text}" for name, text in graph.silent if name == worker]
    return why + _table(sorted(rows, key=lambda row: int(row[0].rpartition(".")[2])))


def _edge(edge: GraphEdge, names: list[str]) -> list[str]:
    where = f"{names[edge.source]} > {names[edge.target]}"
    line = said_of_line(edge.line)
    return [edge.name, where, said_of_tensors(edge), sized(edge.bytes), line]


def _cut(edge: GraphEdge, names: list[str]) -> list[str]:
    where = f"{names[edge.source]} > {names[edge.target]}"
    times = "" if edge.times == 1 else f"{edge.times} times"
    return [where, counted(edge.count, "tensor"), edge.what, said_of_line(edge.line), times]


def _section(title: str, rows: list[list[str]]) -> list[str]:
    return ["", title, *_table(rows)] if rows else []


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# -- for graphviz


def dot_of(graph: Graph) -> str:
    """A cluster for each worker."""
    lines = ["digraph gradwire {", "  rankdir=LR;", "  node [shape=box, fontname=sans];"]
    for n, worker in enumerate(graph.workers):
        lines += [f"  subgraph cluster_{n} {{", f"    label={_quoted([worker])};"]
        lines += [
            f"    p{m} [{_looks_of_part(part)}];"
            for m, part in enumerate(graph.parts)
            if part.worker == worker
        ]
        lines.append("  }")
    lines += [f"  p{e.source} -> p{e.target} [{_looks_of_edge(e)}];" for e in graph.edges]
    return "\n".join([*lines, "}", ""])


def _looks_of_part(part: GraphPart) -> str:
    looks = f"label={_quoted(said_of_part(part))}"
    if part.kind is PartKind.CUT:
        return f"{looks}, color=red, fontcolor=red"
    if not part.is_reached:
        return f"{looks}, color=grey, fontcolor=grey"
    return looks if part.kind is PartKind.LOCAL else f"{looks}, style=dashed"


def _looks_of_edge(edge: GraphEdge) -> str:
    if edge.kind is EdgeKind.INSIDE:
        return "arrowhead=open" if edge.is_reached else "arrowhead=open, color=grey"
    if edge.kind is EdgeKind.CUT:
        said = _quoted([said_of_line(edge.line), edge.what])
        return f"label={said}, color=red, fontcolor=red, style=dashed"
    said = _quoted([f"{edge.name} {said_of_tensors(edge)}", sized(edge.bytes)])
    return f"label={said}" if edge.is_reached else f"label={said}, color=grey, fontcolor=grey"


def _quoted(lines: Iterable[str]) -> str:
    text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines if line)
    return f'"{text}"'
