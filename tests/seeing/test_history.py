"""Rates, lanes and silence, from statuses at known times."""

from __future__ import annotations

import pytest

from gradwire.seeing.history import LANE_SECONDS, MOST_WAITS, History
from gradwire.seeing.status import PeerTraffic, Totals
from tests.seeing.statuses import request, status

PERIOD = 0.25


@pytest.fixture
def history():
    made = History(PERIOD)
    made.members(["w0", "w1"], 0.0)
    return made


def view(history, now):
    return history.view(now, "w0", 7, "train.py")


def row(history, now, name="w1"):
    return next(row for row in view(history, now).workers if row.name == name)


def test_rates_are_of_the_last_two_seconds(history):
    for tick in range(21):
        at = tick * PERIOD
        sent = 0 if at < 3.0 else (at - 3.0) * 1000
        traffic = (PeerTraffic("w0", int(sent), int(sent) // 2, 0.0),)
        history.heard("w1", status("w1", traffic=traffic, totals=Totals(tick, 3 * tick)), at)

    rates = row(history, 5.0).rates

    assert (rates.made, rates.served) == (4.0, 12.0)
    assert (rates.sent, rates.received) == (1000.0, 500.0)
    (sent,) = view(history, 5.0).traffic
    assert (sent.worker, sent.peer, sent.bytes, sent.rate) == ("w1", "w0", 2000, 1000.0)


def test_a_worker_that_does_not_answer_is_silent_since_it_answered_last(history):
    history.heard("w1", status("w1"), 1.0)

    assert row(history, 1.9).silent is None
    known = row(history, 7.5)

    assert (known.doing, known.silent) == ("silent", 6.5)


def test_a_worker_that_never_answered_is_silent_since_it_was_asked(history):
    assert (row(history, 0.5).doing, row(history, 0.5).silent) == ("unknown", None)
    assert (row(history, 3.0).doing, row(history, 3.0).silent) == ("silent", 3.0)


def test_what_a_silent_worker_waited_for_gets_older(history):
    history.heard("w1", status("w1", request("w0", age=2.0, left=58.0)), 1.0)

    (wait,) = view(history, 11.0).waits

    assert (wait.age, wait.left) == (12.0, 48.0)


def test_a_lane_says_what_was_done_at_each_look(history):
    done = [status("w1"), status("w1", request("w0")), status("w1", has_program=True)]
    for tick, each in enumerate(done):
        history.heard("w1", each, tick * PERIOD)
        history.tick(tick * PERIOD)
    history.tick(5.0)

    lane = row(history, 5.0).lane

    assert len(lane) == LANE_SECONDS / PERIOD
    assert lane.endswith("uiwrs")


def test_nothing_is_said_of_a_time_in_which_nobody_was_asked(history):
    history.heard("w1", status("w1", totals=Totals(1000)), 1.0)
    history.tick(1.0)

    history.slept(500.0)

    known = row(history, 500.0)
    assert (known.doing, known.silent, set(known.lane)) == ("unknown", None, {"u"})


def test_a_restarted_worker_counts_anew(history):
    history.heard("w1", status("w1", totals=Totals(1000)), 1.0)
    history.heard("w1", status("w1", totals=Totals(3), pid=8), 1.25)

    assert row(history, 1.25).rates.made == 0.0


def test_a_worker_that_has_left_is_not_shown(history):
    history.heard("w1", status("w1"), 1.0)

    history.members(["w0", "w2"], 2.0)
    history.heard("w1", status("w1"), 2.0)

    assert [row.name for row in view(history, 2.0).workers] == ["w0", "w2"]


def test_what_asking_has_raised_is_shown_until_an_answer_comes(history):
    history.failed("w1", "w1 was lost")
    assert row(history, 3.0).why == "w1 was lost"

    history.heard("w1", status("w1"), 4.0)

    assert row(history, 4.0).why == ""


def test_a_view_has_a_bounded_size(history):
    names = [f"w{n}" for n in range(50)]
    history.members(names, 0.0)
    for name in names:
        history.heard(name, status(name, *[request("w0", n) for n in range(1, 61)]), 0.0)

    shown = view(history, 0.0)

    assert len(shown.waits) == MOST_WAITS
    assert shown.hidden_waits == 3000 - MOST_WAITS
