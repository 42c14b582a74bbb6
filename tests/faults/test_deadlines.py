"""F15: calls that are given up at any moment leave nothing, and their worker serves the next."""

from __future__ import annotations

import random
import sys

import pytest
import torch

import gradwire
from gradwire import CallTimeout
from gradwire.testing import cluster, faults
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
CALLS = 60


def through(route, x):
    return gradwire.rpc_sync(route[0], through, args=(route[1:], x)) * 2 if route else x * 2


@pytest.mark.parametrize("seed", range(3))
def test_f15_deadlines_at_random_moments_leave_nothing(seed):
    chance = random.Random(seed)
    given_up = []

    def call():
        timeout = 10 ** chance.uniform(-5, -1.5)
        x = torch.ones(1, requires_grad=True)
        try:
            with gradwire.context():
                y = gradwire.rpc_sync("w1", through, args=(["w2", "w1"], x), timeout=timeout)
                y.backward()
            return x.grad.item()
        except CallTimeout as error:
            given_up.append(str(error))
            return None

    with cluster(3, expose=[HERE]) as workers:
        workers[0].run(through, ["w1", "w2"], torch.ones(1))  # they are connected
        outcomes = {workers[0].run(call) for _ in range(CALLS)}
        assert_nothing_left(workers)

    assert outcomes <= {8.0, None}
    assert given_up
    assert all("w1" in text or "w2" in text or "deadline" in text for text in given_up)


def test_f15_what_comes_after_its_deadline_changes_nothing():
    x = torch.ones(1, requires_grad=True)

    def late():
        with (
            gradwire.context(),
            pytest.raises(CallTimeout, match="w1 did not answer"),
        ):
            gradwire.rpc_sync("w1", through, args=([], x), timeout=0.25)

    with cluster(2, expose=[HERE]) as workers:
        workers[0].run(through, ["w1"], torch.ones(1))
        workers[1].run(faults.arm, "delay before-reply Call")
        workers[0].run(late)
        workers[1].run(faults.release)
        assert_nothing_left(workers)
        assert workers[1].run(faults.fired) == {"delay before-reply Call": True}

    assert x.grad is None
