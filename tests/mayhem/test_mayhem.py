"""A random quarter of a minute: see tests/mayhem/hour.py."""

from __future__ import annotations

import pytest

from tests import strength
from tests.mayhem.hour import KINDS, Hour

pytestmark = [pytest.mark.slow, pytest.mark.processes]

EPISODES = strength.count(12, 5)


def test_whatever_happens_ends_in_time_and_the_next_step_is_exact():
    with Hour(seed=3) as hour:
        for _ in range(EPISODES):
            hour.episode()

        assert sum(hour.faults.values()) == EPISODES
        assert hour.faults.keys() <= set(KINDS)
        assert hour.leftovers() == {}
