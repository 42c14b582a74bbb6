"""Random programs over an in-process cluster are as in one process."""

from __future__ import annotations

import pytest

from gradwire import Options, Timeouts
from gradwire.testing import cluster
from tests.oracle.check import Checker, exposed

PROGRAMS = 600
BATCH = 100


@pytest.fixture(scope="module")
def checker():
    options = Options(timeouts=Timeouts(call=30, backward=15))
    with cluster(5, expose=exposed(), options=options) as workers:
        yield Checker(workers[0].run)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, BATCH))
def test_random_programs_are_as_in_one_process(checker, first):
    failures = [checker.failure(seed) for seed in range(first, first + BATCH)]

    assert [failure for failure in failures if failure is not None] == []


@pytest.mark.slow
def test_every_feature_was_drawn_and_few_programs_were_skipped(checker):
    assert checker.never_drawn() == []
    assert checker.skipped < PROGRAMS // 50
