"""What several workers say, put together: also if one says nothing, or nonsense."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gradwire.errors import BadMessage
from gradwire.ids import EdgeId
from gradwire.rpc.graph_cut import Cut
from gradwire.seeing.graph_join import Answers, check_parts, cleaned, joined, other_workers
from gradwire.seeing.graph_messages import EdgeSeen, GraphParts, LocalPart, TensorShape
from gradwire.seeing.graph_model import PartKind

NAMES = {0: "w0", 1: "w1", 2: "w2"}
NOTHING = GraphParts([], [], [], [], [], False, [])


def part(nodes=1, roots=()):
    return LocalPart(nodes, 0, 0, 0, 0, [("Sin", 1)], True, list(roots))


def end(worker, n, peer, depth, at):
    shapes = [TensorShape("float32", [3])]
    return EdgeSeen(EdgeId(worker, n), peer, depth, at, shapes, 1, 12, "", True)


def of(parts, sent=(), received=(), **more):
    return replace(NOTHING, parts=parts, sent=list(sent), received=list(received), **more)


def test_both_ends_make_one_edge():
    w0 = of([part()], sent=[end(0, 0, 1, 1, 0)])
    w1 = of([part(2)], received=[end(0, 0, 0, 1, 0)])
    graph = joined(Answers({0: w0, 1: w1}, {}), NAMES, 0, {})

    (edge,) = graph.edges
    assert (edge.name, graph.parts[edge.source].nodes, graph.parts[edge.target].nodes) == (
        *("e0.0", 1, 2),
    )


def test_a_silent_worker_between_is_shown_once_for_each_time_that_the_graph_goes_through_it():
    """w0 sends to it twice, the second time what depends on its first answer."""
    w0 = of(
        [part(), part(), part()],
        sent=[end(0, 0, 1, 1, 0), end(0, 1, 1, 3, 1)],
        received=[end(1, 0, 1, 2, 1), end(1, 1, 1, 4, 2)],
    )
    graph = joined(Answers({0: w0}, {1: "lost: it left"}), NAMES, 0, {})

    assert [p.kind for p in graph.parts if p.worker == "w1"] == [PartKind.SILENT] * 2
    assert [(e.source, e.target) for e in graph.edges] == [(0, 3), (3, 1), (1, 4), (4, 2)]
    assert graph.silent == (("w1", "lost: it left"),)


def test_an_end_that_an_answer_does_not_have_is_gone_or_left_out():
    w1 = of([part()], received=[end(0, 7, 0, 1, 0)])
    gone = joined(Answers({0: replace(NOTHING, gone=[7]), 1: w1}, {}), NAMES, 1, {})
    omitted = joined(Answers({0: NOTHING, 1: w1}, {}), NAMES, 1, {0: 3})

    assert gone.parts[1].kind is PartKind.GONE
    assert omitted.parts[1].kind is PartKind.LEFT_OUT
    assert omitted.left_out == ("3 edges further from the roots: not drawn",)


def test_a_worker_that_claims_to_have_received_what_went_to_another_is_not_believed():
    w0 = of([part()], sent=[end(0, 0, 1, 1, 0)])
    honest = of([part(2)], received=[end(0, 0, 0, 1, 0)])
    liar = replace(honest, parts=[part(3)])
    graph = joined(Answers({0: w0, 1: honest, 2: liar}, {}), NAMES, 0, {})

    (edge,) = graph.edges
    assert graph.parts[edge.target].worker == "w1"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (of([part()], inside=[(0, 1)]), "a part that it does not describe"),
        (of([part()], sent=[end(1, 0, 0, 1, -1)]), "a part that it does not describe"),
        (of([part()], sent=[end(2, 0, 0, 1, 0)]), "an edge of another worker"),
        (of([part()], received=[end(2, 0, 0, 1, 0)]), "a worker that has not sent it"),
    ],
    ids=["inside", "negative", "foreign", "received"],
)
def test_nonsense_is_refused(parts, why):
    with pytest.raises(BadMessage, match=f"w1 .*{why}"):
        check_parts(parts, 1)


def test_who_stands_at_the_other_ends_is_asked_too():
    cut = Cut("a.py:1", "the arguments of f on w2", 1, 0, 2)
    w0 = of([part()], sent=[end(0, 0, 1, 1, 0)], cuts=[cut])
    assert other_workers(Answers({0: w0}, {}), [0]) == [1, 2]
    assert other_workers(Answers({0: w0}, {}), [0, 1]) == [2]


def test_a_cut_has_an_arrow_and_one_of_unknown_workers_has_none():
    cuts = [Cut("a.py:1", "what was serialized", 2, None, None, 5), Cut("", "f", 1, 0, 99)]
    graph = joined(Answers({0: of([], cuts=cuts)}, {}), NAMES, 0, {})

    (cut,) = graph.cuts
    assert (cut.count, cut.times, cut.line) == (2, 5, "a.py:1")


def test_texts_of_peers_are_short_and_printable():
    assert cleaned("a\x1b[31m\x00b") == "a?[31m?b"
    assert len(cleaned("x" * 10_000)) == 200
