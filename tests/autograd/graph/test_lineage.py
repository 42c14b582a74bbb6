"""The algebra of edges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.autograd.graph.walk import (
    NOTHING,
    bits_from_wire,
    bits_to_wire,
    from_wire,
    meets,
    numbers,
    plus,
    to_wire,
    union,
)
from gradwire.ids import EdgeId

edges = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 200)))


def lineage(of):
    total = NOTHING
    for worker, n in of:
        total = plus(total, EdgeId(worker, n))
    return total


@given(edges, edges)
def test_a_union_holds_the_edges_of_both_and_changes_neither(a, b):
    one, other = lineage(a), lineage(b)
    before = dict(one), dict(other)

    assert union([one, other]) == lineage(a | b)
    assert (one, other) == before


@given(edges)
def test_a_lineage_travels(of):
    assert from_wire(to_wire(lineage(of))) == lineage(of)


@given(st.sets(st.integers(0, 3000)))
def test_numbers_are_the_bits(of):
    bits = sum(1 << n for n in of)

    assert list(numbers(bits)) == sorted(of)
    assert bits_from_wire(bits_to_wire(bits)) == bits


@given(edges, st.integers(0, 4), st.sets(st.integers(0, 200)))
def test_meeting_is_having_an_edge_in_common(of, worker, asked):
    bits = sum(1 << n for n in asked)

    assert meets(lineage(of), worker, bits) == any((worker, n) in of for n in asked)
