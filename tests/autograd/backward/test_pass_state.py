"""One pass, in any order of messages."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.autograd.backward.active_pass import ActivePass
from gradwire.autograd.backward.pass_state import PassState
from gradwire.autograd.graph.edges import Edges
from gradwire.errors import BadMessage
from gradwire.ids import EdgeId, PassId

EDGES = [EdgeId(1, n) for n in range(4)]


def a_pass(asked=()):
    return PassState(PassId(0, 1), asked)


def test_an_edge_is_settled_exactly_once():
    state = a_pass()
    state.edge_settled(EDGES[0])

    with pytest.raises(BadMessage, match=r"e1\.0 was settled twice in p0\.1"):
        state.edge_settled(EDGES[0])


def test_what_was_settled_and_not_collected_is_known():
    state = a_pass()
    for edge in EDGES[:2]:
        state.edge_settled(edge)
    state.edge_collected(EDGES[1])

    assert state.to_collect == {EDGES[0]}


def test_collecting_twice_or_too_early_is_a_mistake_of_ours():
    state = a_pass()
    with pytest.raises(AssertionError, match="before it was settled"):
        state.edge_collected(EDGES[0])
    state.edge_settled(EDGES[0])
    state.edge_collected(EDGES[0])
    with pytest.raises(AssertionError, match="collected twice"):
        state.edge_collected(EDGES[0])


def test_a_worker_that_was_not_asked_cannot_be_done():
    state = a_pass(asked=[1])

    with pytest.raises(BadMessage, match=r"worker 2 ended p0\.1 without having been asked"):
        state.worker_done(2, has_changed=False)


def test_only_the_first_error_is_told():
    active = ActivePass(PassId(0, 1), 1.0, 0.0, Edges(0, 0, 1, threading.RLock()))
    first = ValueError("first")
    active.fail(first)
    active.fail(ValueError("second"))

    assert active.error is first


@given(st.permutations([1, 2, 3, 4]))
def test_the_root_waits_for_all_in_whatever_order(order):
    state = a_pass(asked=order)
    for worker in order:
        assert worker in state.unfinished()
        assert worker in state.waiting_for
        assert state.concerns(worker)
        state.worker_done(worker, has_changed=worker > 2)
        assert worker not in state.waiting_for

    assert state.unfinished() == []
    assert state.concerns(0)
    assert not state.concerns(1)
    assert state.concerns(3)  # if it is lost now it puts back what it has changed
    assert state.changed == {3, 4}


@given(st.permutations(["send 0", "send 1", "recv", "recv"]))
def test_the_last_recv_of_a_counted_run_is_known(order):
    state = a_pass()
    state.run_counted(sends=2, recvs=2)
    told = []
    for what in order:
        if what == "recv":
            told.append(state.recv_through())
        else:
            edge = EDGES[int(what.removeprefix("send "))]
            state.edge_settled(edge)
            state.edge_collected(edge)

    assert told == [False, order[-1] == "recv"]


def test_of_a_run_that_was_not_counted_no_recv_is_the_last():
    state = a_pass()

    assert not any(state.recv_through() for _ in range(3))
