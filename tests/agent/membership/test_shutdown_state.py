"""The pure state of a graceful shutdown."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gradwire.agent.membership.shutdown_state import (
    OVER,
    QUIET,
    READY,
    ShutdownProgress,
)


def test_a_worker_waits_for_everyone_to_be_over():
    progress = ShutdownProgress([1, 2])
    progress.reached(1, OVER)

    assert progress.missing(OVER) == [2]
    progress.reached(2, OVER)
    assert progress.missing(OVER) == []
    assert progress.missing(QUIET) == [1, 2]


def test_who_is_quiet_is_also_over_and_repeats_do_no_harm():
    progress = ShutdownProgress([1])
    progress.reached(1, QUIET)
    progress.reached(1, OVER)

    assert progress.missing(QUIET) == []


def test_a_lost_worker_is_not_waited_for_but_named():
    progress = ShutdownProgress([1, 2])
    progress.reached(1, QUIET)
    progress.peer_lost(1)
    progress.peer_lost(2)

    assert progress.missing(QUIET) == []
    assert progress.lost_before_quiet() == [2]


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([OVER, QUIET, None]))))
def test_phases_only_grow_whatever_the_order(said):
    progress, missing = ShutdownProgress([1, 2, 3]), {1, 2, 3}
    for worker, phase in said:
        if phase is None:
            progress.peer_lost(worker)
        else:
            progress.reached(worker, phase)
        now = set(progress.missing(QUIET))
        assert now <= missing
        missing = now


def test_one_that_is_back_has_said_nothing_yet():
    progress = ShutdownProgress([1, 2])
    progress.reached(1, QUIET)
    progress.peer_lost(1)
    assert progress.missing(READY) == [2]
    progress.reborn(1)

    assert progress.missing(OVER) == [1, 2]
    assert not progress.has_reached(1, OVER)
    progress.reached(1, OVER)
    assert progress.has_reached(1, OVER)
    assert progress.missing(OVER) == [2]
    assert progress.lost_before_quiet() == []


def test_the_time_to_shut_down_does_not_begin_while_a_program_runs():
    progress = ShutdownProgress([1, 2])
    progress.reached(1, OVER)

    assert progress.seconds_left(0, 60) == math.inf
    assert progress.seconds_left(3600, 60) == math.inf
    progress.reached(2, OVER)
    assert progress.seconds_left(7200, 60) == 60
    assert progress.seconds_left(7250, 60) == 10


def test_one_that_is_cut_off_is_waited_for_as_long_as_shutting_down_may_take():
    progress = ShutdownProgress([1])
    assert progress.seconds_left(0, 60) == math.inf
    progress.disconnected(1)

    assert progress.missing(OVER) == [1]
    assert progress.seconds_left(100, 60) == 60
    assert progress.seconds_left(130, 60) == 30


def test_one_that_comes_back_is_waited_for_again_without_end():
    progress = ShutdownProgress([1])
    progress.disconnected(1)
    assert progress.seconds_left(0, 60) == 60
    progress.is_back(1)

    assert progress.seconds_left(59, 60) == math.inf
    progress.reached(1, OVER)
    assert progress.seconds_left(100, 60) == 60, "the time begins anew"


def test_one_that_is_gone_is_not_waited_for_until_it_comes_back():
    progress = ShutdownProgress([1])
    progress.disconnected(1)
    progress.peer_lost(1)

    assert progress.missing(READY) == []
    assert progress.seconds_left(0, 60) == 60
    progress.reborn(1)
    assert progress.missing(OVER) == [1]
    assert progress.seconds_left(1, 60) == math.inf


def test_one_that_connects_is_back_before_it_was_told_how_far_we_are():
    progress = ShutdownProgress([1])
    assert progress.disconnected(1)
    assert progress.seconds_left(0, 60) == 60
    assert not progress.connected(1), "somebody tries to tell it already"

    assert progress.seconds_left(60, 60) == math.inf
    assert progress.is_untold(1), "it may not have heard yet"


def test_who_speaks_again_may_still_not_have_heard_us():
    progress = ShutdownProgress([1])
    progress.disconnected(1)
    progress.reached(1, QUIET)

    assert progress.is_untold(1)


def test_what_was_said_before_another_loss_is_said_again():
    progress = ShutdownProgress([1])
    assert progress.disconnected(1)
    before = progress.epoch(1)
    assert not progress.disconnected(1), "whoever tells it goes on"
    progress.told(1, before)

    assert progress.is_untold(1)
    progress.told(1, progress.epoch(1))
    assert not progress.is_untold(1)
    assert progress.missing(OVER) == [1]
    assert progress.seconds_left(0, 60) == math.inf
    assert progress.disconnected(1)


def test_one_that_was_gone_and_connects_is_waited_for_and_told_again():
    progress = ShutdownProgress([1])
    progress.peer_lost(1)
    assert progress.missing(READY) == []
    assert not progress.is_untold(1)
    assert progress.connected(1)

    assert progress.missing(OVER) == [1]
    assert progress.seconds_left(0, 60) == math.inf
    assert progress.is_untold(1)


def test_a_refusal_that_is_heard_of_late_says_nothing_of_a_later_incarnation():
    """Nobody listened where the earlier incarnation did; meanwhile the later one has said hello."""
    progress = ShutdownProgress([1])
    progress.disconnected(1)
    before = progress.epoch(1)
    progress.reborn(1)
    progress.refused(1, before)

    assert progress.missing(READY) == [1]
    progress.refused(1, progress.epoch(1))
    assert progress.missing(READY) == []
    assert not progress.is_untold(1)


def test_who_is_unheard_is_the_cause_of_those_that_may_wait_for_it():
    progress = ShutdownProgress([1, 2, 3])
    assert progress.blockers([1, 2, 3], []) == [1, 2, 3], "not known"
    assert progress.blockers([1, 2, 3], [2]) == [2]
    progress.disconnected(3)
    assert progress.blockers([1, 2, 3], [2]) == [2, 3]
    assert progress.blockers([1], []) == [1]


def test_one_that_is_ready_has_to_know_that_we_are():
    progress = ShutdownProgress([1, 2])
    assert progress.unconfirmed() == []
    for worker in (1, 2):
        progress.reached(worker, READY)
    assert progress.unconfirmed() == [1, 2]
    progress.confirmed.add(1)
    assert progress.may_be_gone(1)
    assert not progress.may_be_gone(2), "it waits for us, if our word was lost"
    assert progress.unconfirmed() == [2]
    progress.peer_lost(2)
    assert progress.unconfirmed() == []


def test_a_later_incarnation_has_confirmed_nothing():
    progress = ShutdownProgress([1])
    progress.reached(1, READY)
    progress.confirmed.add(1)
    progress.reborn(1)
    progress.reached(1, READY)
    assert progress.unconfirmed() == [1]
