"""Random programs over an in-process cluster are as in one process."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest

from gradwire import Options, Timeouts
from gradwire.rpc.behavior import Behavior
from tests import strength
from tests.oracle.check import Checker, workers
from tests.oracle.programs import KINDS, draw, features_of

PROGRAMS = strength.seeds(600, 60)
BATCHES = [PROGRAMS[n : n + 60] for n in range(0, len(PROGRAMS), 60)]
TOGETHER = strength.seeds(200, 20)
OPTIONS = Options(timeouts=Timeouts(call=30, backward=15))


@contextmanager
def running(behavior: Behavior | None = None):
    """A cluster whose workers have generators of their own."""
    with workers(OPTIONS, behavior) as on_w0:
        yield Checker(on_w0, together=behavior is not None)


@pytest.fixture(scope="module")
def checker():
    with running() as checker:
        yield checker


@pytest.mark.slow
@pytest.mark.parametrize("programs", BATCHES, ids=range(len(BATCHES)))
def test_random_programs_are_as_in_one_process(checker, programs):
    failures = [checker.failure(seed) for seed in programs]

    assert [failure for failure in failures if failure is not None] == []


@pytest.mark.slow
def test_few_programs_were_skipped(checker):
    assert checker.skipped < max(5, len(PROGRAMS) // 50)


def test_every_feature_is_drawn():
    drawn = Counter()
    for seed in range(600):
        drawn += draw(seed).features

    assert [feature for feature in features_of(KINDS) if not drawn[feature]] == []


@pytest.mark.slow
def test_random_programs_with_one_edge_per_message_are_as_in_one_process():
    with running(Behavior(edge_per_message=True)) as checker:
        failures = [checker.failure(seed) for seed in TOGETHER]

    assert [failure for failure in failures if failure is not None] == []
    assert checker.skipped < max(4, len(TOGETHER) // 50)
