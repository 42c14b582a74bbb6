"""Leaving together, as a state."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gradwire.agent.membership.shutdown_state import OVER, QUIET, READY, Departure, Patience


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


def test_the_time_to_shut_down_does_not_begin_while_a_program_runs():
    departure, patience = Departure([1, 2]), Patience(60)
    departure.said(1, OVER)

    assert patience.left(0, departure) == math.inf
    assert patience.left(3600, departure) == math.inf
    departure.said(2, OVER)
    assert patience.left(7200, departure) == 60
    assert patience.left(7250, departure) == 10


def test_one_that_is_cut_off_is_waited_for_as_long_as_shutting_down_may_take():
    departure, patience = Departure([1]), Patience(60)
    assert patience.left(0, departure) == math.inf
    departure.cut_off(1)

    assert departure.missing(OVER) == [1]
    assert patience.left(100, departure) == 60
    assert patience.left(130, departure) == 30


def test_one_that_comes_back_is_waited_for_again_without_end():
    departure, patience = Departure([1]), Patience(60)
    departure.cut_off(1)
    assert patience.left(0, departure) == 60
    departure.is_back(1)

    assert patience.left(59, departure) == math.inf
    departure.said(1, OVER)
    assert patience.left(100, departure) == 60, "the time begins anew"


def test_one_that_is_gone_is_not_waited_for_until_it_comes_back():
    departure, patience = Departure([1]), Patience(60)
    departure.cut_off(1)
    departure.peer_lost(1)

    assert departure.missing(READY) == []
    assert patience.left(0, departure) == 60
    departure.reborn(1)
    assert departure.missing(OVER) == [1]
    assert patience.left(1, departure) == math.inf


def test_one_that_connects_is_back_before_it_was_told_how_far_we_are():
    departure, patience = Departure([1]), Patience(60)
    assert departure.cut_off(1)
    assert patience.left(0, departure) == 60
    assert not departure.joined(1), "somebody tries to tell it already"

    assert patience.left(60, departure) == math.inf
    assert departure.is_untold(1), "it may not have heard yet"


def test_who_speaks_again_may_still_not_have_heard_us():
    departure = Departure([1])
    departure.cut_off(1)
    departure.said(1, QUIET)

    assert departure.is_untold(1)


def test_what_was_said_before_another_loss_is_said_again():
    departure = Departure([1])
    assert departure.cut_off(1)
    before = departure.change(1)
    assert not departure.cut_off(1), "whoever tells it goes on"
    departure.told(1, before)

    assert departure.is_untold(1)
    departure.told(1, departure.change(1))
    assert not departure.is_untold(1)
    assert departure.missing(OVER) == departure.working() == [1]
    assert departure.cut_off(1)


def test_one_that_was_gone_and_connects_is_waited_for_and_told_again():
    departure, patience = Departure([1]), Patience(60)
    departure.peer_lost(1)
    assert departure.missing(READY) == []
    assert not departure.is_untold(1)
    assert departure.joined(1)

    assert departure.missing(OVER) == [1]
    assert patience.left(0, departure) == math.inf
    assert departure.is_untold(1)


def test_a_refusal_that_is_heard_of_late_says_nothing_of_a_later_life():
    """Nobody listened where the earlier life did; meanwhile the later one has said hello."""
    departure = Departure([1])
    departure.cut_off(1)
    before = departure.change(1)
    departure.reborn(1)
    departure.refused(1, before)

    assert departure.missing(READY) == [1]
    departure.refused(1, departure.change(1))
    assert departure.missing(READY) == []
    assert not departure.is_untold(1)


def test_who_is_unheard_is_the_cause_of_those_that_may_wait_for_it():
    departure = Departure([1, 2, 3])
    assert departure.causes([1, 2, 3], []) == [1, 2, 3], "not known"
    assert departure.causes([1, 2, 3], [2]) == [2]
    departure.cut_off(3)
    assert departure.causes([1, 2, 3], [2]) == [2, 3]
    assert departure.causes([1], []) == [1]
