"""Where things stand in the picture of a graph: nothing overlaps, whatever the graph."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.seeing.graph_layout import columns_of
from gradwire.seeing.graph_model import EdgeKind, GraphEdge, GraphPart, PartKind
from gradwire.seeing.graph_picture import Graph
from gradwire.seeing.graph_svg import LETTER

WORKERS = ("w0", "parameter-server", "w2")


@st.composite
def graphs(draw):
    """Any graph without a cycle: edges lead from a part to a later one."""
    count = draw(st.integers(1, 12))
    parts = [
        GraphPart(
            draw(st.sampled_from(WORKERS)),
            draw(st.sampled_from([PartKind.LOCAL, PartKind.SILENT])),
            nodes=draw(st.integers(0, 1000)),
            saved=draw(st.integers(0, 1 << 40)),
            roots=("float32[]",) if n == count - 1 else (),
            is_reached=draw(st.booleans()),
        )
        for n in range(count)
    ]
    edges = []
    for n in range(draw(st.integers(0, 20)) if count > 1 else 0):
        source = draw(st.integers(0, count - 2))
        target = draw(st.integers(source + 1, count - 1))
        kind = draw(st.sampled_from([EdgeKind.CROSSING, EdgeKind.INSIDE]))
        edges.append(GraphEdge(source, target, kind, f"e0.{n}", ("float32[128, 256]",), 1, 1 << 20))
    for _ in range(draw(st.integers(0, 3))):
        ends = len(parts), len(parts) + 1
        parts += [GraphPart(draw(st.sampled_from(WORKERS)), PartKind.CUT) for _ in range(2)]
        edges.append(GraphEdge(*ends, EdgeKind.CUT, line="/a/b.py:3", what="the result of f on w1"))
    return Graph("w0", WORKERS, tuple(parts), tuple(edges), (("w2", "lost"),), ("more",))


def parsed(graph):
    return ET.fromstring(graph.svg().replace('xmlns="http://www.w3.org/2000/svg" ', ""))


def texts_in(element, dx=0.0, dy=0.0):
    """The rectangle of each text, as wide as its letters may be: left, top, right, bottom."""
    moved = re.match(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
    if moved:
        dx, dy = dx + float(moved[1]), dy + float(moved[2])
    if element.tag == "text":
        x, y = float(element.get("x")) + dx, float(element.get("y")) + dy
        size = {"title": 14, "worker": 13}.get(element.get("class"), 11)
        yield x, y - 0.8 * size, x + len(element.text) * LETTER * size / 11, y + 0.25 * size
    for child in element:
        yield from texts_in(child, dx, dy)


def boxes_in(root):
    for part in root.iter("g"):
        if "part" in part.get("class", "").split():
            rect = part.find("rect")
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            yield x, y, x + w, y + h


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.slow
@settings(max_examples=60)
@given(graphs())
def test_no_texts_and_no_boxes_overlap_and_all_are_inside(graph):
    root = parsed(graph)
    width, height = float(root.get("width")), float(root.get("height"))

    texts, boxes = list(texts_in(root)), list(boxes_in(root))

    assert not [pair for pair in itertools.combinations(texts, 2) if overlap(*pair)]
    assert not [pair for pair in itertools.combinations(boxes, 2) if overlap(*pair)]
    assert min(min(left, top) for left, top, _, _ in texts) >= 0
    assert all(right <= width and bottom <= height for _, _, right, bottom in texts)
    assert len(boxes) == len(graph.parts)


@pytest.mark.slow
@settings(max_examples=60)
@given(graphs())
def test_every_arrow_leads_to_the_right_and_through_no_box(graph):
    root = parsed(graph)
    boxes = list(boxes_in(root))
    arrows = [g for g in root.iter("g") if "edge" in g.get("class", "").split()]
    assert len(arrows) == len(graph.edges)
    for arrow in arrows:
        path = arrow.find("path").get("d")
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
        assert numbers[0] < numbers[-2]
        for y, until in straight_pieces(path):
            between = until[0] + 1, y, until[1] - 1, y + 0.1
            assert not [box for box in boxes if overlap(between, box)]


def straight_pieces(path):
    """The height of each straight piece of a path, and from where to where it goes."""
    x = y = 0.0
    for command, text in re.findall(r"([MHC])([^MHC]*)", path):
        numbers = [float(number) for number in text.split()]
        if command == "H":
            yield y, (x, numbers[0])
            x = numbers[0]
        else:
            x, y = numbers[-2:]


@pytest.mark.slow
@settings(max_examples=60)
@given(graphs())
def test_columns_grow_along_every_edge(graph):
    ends = [(edge.source, edge.target) for edge in graph.edges]
    columns = columns_of(len(graph.parts), ends)
    assert all(columns[source] < columns[target] for source, target in ends)


def test_a_cycle_that_a_wrong_worker_reports_is_drawn_all_the_same():
    parts = tuple(GraphPart("w0", nodes=1) for _ in range(3))
    edges = (GraphEdge(0, 1), GraphEdge(1, 2), GraphEdge(2, 1))
    graph = Graph("w0", ("w0",), parts, edges)

    assert columns_of(3, [(0, 1), (1, 2), (2, 1)]) == [1, 2, 2]
    assert len(list(boxes_in(parsed(graph)))) == 3
    assert str(graph)


def test_what_is_used_late_stands_near_to_what_uses_it():
    assert columns_of(4, [(0, 1), (1, 2), (3, 2)]) == [0, 1, 2, 1]


def test_names_of_the_program_are_escaped():
    part = GraphPart('<w"0>', nodes=1, operators=(("<script>", 1),))
    graph = Graph('<w"0>', ('<w"0>',), (part,), ())

    assert "<script>" not in graph.svg()
    assert parsed(graph) is not None
    assert r'label="<w\"0>"' in graph.dot()
