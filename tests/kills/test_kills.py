"""A worker dies at a point of a step: the others say who, leave nothing, and go on exactly."""

from __future__ import annotations

from itertools import islice

import pytest

from tests import strength
from tests.kills.loop import Loop

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROUNDS = strength.count(30, 12)


def test_whoever_dies_wherever_is_named_and_the_next_step_is_exact():
    with Loop(seed=7) as loop:
        for number, death in enumerate(islice(loop.deaths(), ROUNDS), 1):
            try:
                loop.round(death)
            except Exception as error:
                raise AssertionError(f"round {number}: {death}: {error!r}") from error

    assert loop.tally.rounds == ROUNDS
    assert {victim for victim, _, _ in loop.tally.points} == {"w0", "w1", "w2"}


def test_every_kind_of_point_is_met_by_every_role():
    with Loop(seed=0) as loop:
        met = {(victim, point.split()[0]) for victim, _, point, _ in loop.points}
        kinds = {point.split()[1] for _, _, point, _ in loop.points}

    assert met == {
        (victim, point)
        for victim in ("w0", "w1", "w2")
        for point in ("before-send", "after-send", "before-handle", "after-handle", "before-reply")
    }
    assert kinds >= {"Call", "Result", "Start", "Gradients", "RunDone", "PassEnded", "Forget"}
    assert kinds >= {"Prepare", "Commit", "Agreed", "Fork", "Accept", "Drop", "Fetch"}
