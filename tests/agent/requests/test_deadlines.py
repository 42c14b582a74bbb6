"""How much earlier a nested wait ends than the one around it."""

from __future__ import annotations

import itertools

import pytest

from gradwire.agent.requests.timer import ShortenedDeadline, explain_shortening, nested
from gradwire.options import FOREVER


def chain(seconds, levels, asked=2e9):
    """The deadlines of calls within calls, made at once; the first is the outermost."""
    found = [seconds]
    for _ in range(levels):
        found.append(nested(found[-1], 0.0, asked))
    return found


@pytest.mark.parametrize("seconds", [0.01, 1.0, 10.0, 60.0, 86400.0, FOREVER])
def test_all_levels_together_take_a_small_part(seconds):
    deadlines = chain(seconds, 1000)

    assert deadlines[-1] >= seconds - min(seconds / 10, 3) * 1.0001
    assert deadlines[8] >= seconds * 0.94


@pytest.mark.parametrize(("seconds", "levels"), [(60.0, 300), (10.0, 300), (1.0, 20)])
def test_each_ends_before_the_one_around_it(seconds, levels):
    steps = [outer - inner for outer, inner in itertools.pairwise(chain(seconds, levels))]

    assert min(steps) > seconds / 30_000
    assert steps[0] > seconds / 120
    assert min(steps[:8]) > seconds / 1200


def test_one_that_asks_for_less_gets_what_it_asks_for():
    found = nested(10.0, 1.0, 2.0)

    assert found == 3.0
    assert type(found) is float
    assert explain_shortening(found) == ""


def test_one_that_asks_for_less_begins_anew():
    inner = nested(nested(10.0, 0.0, 5.0), 0.0, 60.0)

    assert isinstance(inner, ShortenedDeadline)
    assert (inner.depth, inner.room) == (1, 0.5)


@pytest.mark.parametrize("room", [-1e9, 0.0, 1e9])
def test_what_a_peer_says_does_not_matter_much(room):
    found = nested(ShortenedDeadline(10.0, 3, room, 10.0), 4.0, 60.0)

    assert 7.0 <= found <= 10.0


def test_there_is_always_something_left():
    due = ShortenedDeadline(10.0, 1, 1.0, 60.0)

    assert 9.9999 < nested(due, 9.9999, 60.0) <= 10.0


def test_an_error_says_what_was_asked_for():
    assert explain_shortening(nested(10.0, 0.0, 60.0)) == (
        ", all that the call around it had left (60 s were asked for)"
    )
    assert "(no deadline was asked for)" in explain_shortening(nested(10.0, 0.0, FOREVER))
