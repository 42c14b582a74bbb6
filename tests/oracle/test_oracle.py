"""Random programs over an in-process cluster are as in one process."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from gradwire import Options, Timeouts
from gradwire.rpc.behavior import Behavior
from gradwire.testing import cluster
from tests.oracle import dice
from tests.oracle.check import Checker, exposed

PROGRAMS = 400
BATCH = 100
PROGRAMS_TOGETHER = 120
OPTIONS = Options(timeouts=Timeouts(call=30, backward=15))


@contextmanager
def running(behavior: Behavior | None = None):
    """A cluster whose workers have generators of their own."""
    with (
        dice.owned(5) as own,
        cluster(5, expose=exposed(), options=OPTIONS, behavior=behavior, generators=own) as workers,
    ):
        yield Checker(workers[0].run, together=behavior is not None)


@pytest.fixture(scope="module")
def checker():
    with running() as checker:
        yield checker


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, BATCH))
def test_random_programs_are_as_in_one_process(checker, first):
    failures = [checker.failure(seed) for seed in range(first, first + BATCH)]

    assert [failure for failure in failures if failure is not None] == []


@pytest.mark.slow
def test_every_feature_was_drawn_and_few_programs_were_skipped(checker):
    assert checker.never_drawn() == []
    assert checker.skipped < PROGRAMS // 50


@pytest.mark.slow
def test_random_programs_with_one_edge_per_message_are_as_in_one_process():
    with running(Behavior(edge_per_message=True)) as checker:
        failures = [checker.failure(seed) for seed in range(PROGRAMS_TOGETHER)]

    assert [failure for failure in failures if failure is not None] == []
    assert checker.skipped < PROGRAMS_TOGETHER // 50
