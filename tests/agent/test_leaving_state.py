"""Leaving together, as a state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.agent.leaving_state import OVER, QUIET, READY, Departure


def test_a_worker_waits_for_everyone_to_be_over():
    departure = Departure([1, 2])
    departure.said(1, OVER)

    assert departure.missing(OVER) == [2]
    departure.said(2, OVER)
    assert departure.missing(OVER) == []
    assert departure.missing(QUIET) == [1, 2]


def test_who_is_quiet_is_also_over_and_repeats_do_no_harm():
    departure = Departure([1])
    departure.said(1, QUIET)
    departure.said(1, OVER)

    assert departure.missing(QUIET) == []


def test_a_lost_worker_is_not_waited_for_but_named():
    departure = Departure([1, 2])
    departure.said(1, QUIET)
    departure.peer_lost(1)
    departure.peer_lost(2)

    assert departure.missing(QUIET) == []
    assert departure.abandoned() == [2]


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([OVER, QUIET, None]))))
def test_phases_only_grow_whatever_the_order(said):
    departure, missing = Departure([1, 2, 3]), {1, 2, 3}
    for worker, phase in said:
        if phase is None:
            departure.peer_lost(worker)
        else:
            departure.said(worker, phase)
        now = set(departure.missing(QUIET))
        assert now <= missing
        missing = now


def test_one_that_is_back_has_said_nothing_yet():
    departure = Departure([1, 2])
    departure.said(1, QUIET)
    departure.peer_lost(1)
    assert departure.missing(READY) == [2]
    departure.reborn(1)

    assert departure.missing(OVER) == [1, 2]
    assert not departure.has_reached(1, OVER)
    departure.said(1, OVER)
    assert departure.has_reached(1, OVER)
    assert departure.missing(OVER) == [2]
    assert departure.abandoned() == []
