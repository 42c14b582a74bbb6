"""Some seconds of a storm: see tests/storm/storm.py."""

from __future__ import annotations

import pytest

from tests.storm.hazards import KINDS
from tests.storm.storm import Storm

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_calls_from_anywhere_are_exact_in_time_and_leave_nothing():
    with Storm(seed=3, kinds=KINDS) as storm:
        for _ in range(4):
            storm.episode(1.0)
        storm.end()

    assert storm.done["rounds"] > 0
    assert storm.done["backward"] >= storm.done["rounds"]
