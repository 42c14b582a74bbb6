"""The algebra of edges: a lineage does what a set of edges does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.autograd.graph.lineage import (
    NOTHING,
    by_worker,
    from_wire,
    latest,
    meets,
    minus,
    numbers,
    of_worker,
    one,
    plus,
    to_wire,
    union,
)
from gradwire.errors import BadMessage
from gradwire.ids import LAST_WORKER, EdgeId, first_of

workers = st.sampled_from([0, 1, 2, 7, LAST_WORKER])
FIRST_AGAIN = first_of(3)
"""the first number of a worker that was started again"""
LAST = (1 << 48) - 1
# Near each other, around the ends of chunks, and far away.
counts = st.one_of(
    st.integers(0, 70),
    st.integers(4090, 4100),
    st.integers(FIRST_AGAIN, FIRST_AGAIN + 5000),
    st.just(LAST),
)
edges = st.sets(st.builds(EdgeId, workers, counts), max_size=40)


def lineage(of):
    total = NOTHING
    for edge in of:
        total = plus(total, edge)
    return total


def edges_of(of):
    """The set that a lineage stands for."""
    return {EdgeId(w, n) for w, mine in by_worker(of).items() for n in numbers(mine)}


@given(edges)
def test_a_lineage_is_the_set_of_its_edges(a):
    assert edges_of(lineage(a)) == a
    assert lineage(sorted(a)) == lineage(sorted(a, reverse=True))
    assert bool(lineage(a)) == bool(a)


@given(edges, edges, edges)
def test_the_operations_are_those_of_sets_and_change_nothing_in_place(a, b, c):
    of_a, of_b, of_c = lineage(a), lineage(b), lineage(c)
    before = dict(of_a), dict(of_b), dict(of_c)

    assert edges_of(union([of_a, of_b, of_c])) == a | b | c
    assert edges_of(minus(of_a, of_b)) == a - b
    assert edges_of(minus(of_a, minus(of_a, of_b))) == a & b
    assert meets(of_a, of_b) == bool(a & b)
    assert (of_a, of_b, of_c) == before


@given(edges, edges)
def test_equal_sets_are_equal_lineages_however_they_were_made(a, b):
    """No chunk is empty: whether there are any edges is whether the dict is empty."""
    of_a, of_b = lineage(a), lineage(b)

    assert minus(of_a, of_b) == lineage(a - b)
    assert minus(of_a, minus(of_a, of_b)) == lineage(a & b)
    assert union([of_a, of_b]) == union([of_b, of_a]) == lineage(a | b)


@given(edges, st.builds(EdgeId, workers, counts))
def test_one_more_edge(a, edge):
    assert edges_of(plus(lineage(a), edge)) == a | {edge}
    assert edges_of(one(edge)) == {edge}


@given(edges, workers)
def test_the_edges_of_one_worker_are_counted_from_the_lowest(a, worker):
    mine = sorted(edge.n for edge in a if edge.worker == worker)
    of_mine = of_worker(lineage(a), worker)

    assert list(numbers(of_mine)) == mine
    assert by_worker(lineage(a)).get(worker, {}) == of_mine
    if mine:
        assert latest(of_mine) == mine[-1]


@given(edges)
def test_a_lineage_travels(a):
    assert from_wire(to_wire(lineage(a))) == lineage(a)


def test_a_lineage_that_holds_all_of_a_union_is_the_union_itself():
    alone = lineage([EdgeId(1, 5)])

    assert union([NOTHING, alone, NOTHING]) is alone
    assert union([alone, alone]) is alone
    assert union([]) is NOTHING


def test_what_travels_is_no_longer_than_a_chunk():
    """Bytes after the last edge of a chunk are not sent."""
    low, high = [EdgeId(0, FIRST_AGAIN + 4), EdgeId(0, FIRST_AGAIN + 511)], [EdgeId(0, 1)]

    assert [len(data) for data in to_wire(lineage(low)).values()] == [64]
    assert [len(data) for data in to_wire(lineage(high)).values()] == [1]


@pytest.mark.parametrize(
    "wire",
    [
        {0: b""},
        {0: b"\x00"},
        {0: b"\x01" * 65},
        {-1: b"\x01"},
        {(LAST_WORKER + 1) << 39: b"\x01"},
    ],
    ids=["empty", "zero", "too long", "before all", "no worker"],
)
def test_what_is_no_lineage_is_refused(wire):
    with pytest.raises(BadMessage, match="a lineage is malformed"):
        from_wire(wire)
