"""A worker dies in a state of a block: the other says so, keeps nothing of it, and goes on."""

from __future__ import annotations

import random

import pytest

from tests import strength
from tests.block_kills.__main__ import drawn
from tests.block_kills.loop import Loop

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_whoever_dies_in_whatever_state_of_a_block():
    with Loop("pretend:0") as loop:
        deaths = drawn(loop.deaths, strength.count(8, 4), random.Random(3))
        for death in deaths:
            try:
                loop.round(death)
            except Exception as error:
                raise AssertionError(f"{death}: {error!r}") from error

    assert {death.point.split()[1] for death in loop.deaths} == {
        *("make", "open", "write", "read", "begin", "fill", "filled"),
        *("begin_taking", "take", "taken"),
    }
