"""Several trainers, each in its own contexts, train one shared module."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire.testing import cluster
from tests import strength
from tests.leftovers import assert_nothing_left
from tests.optim import far

STEPS = strength.count(200, 50)
SECONDS = 250.0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("trainers", [2, 4])
def test_no_step_raises_and_every_gradient_is_exact(trainers):
    with cluster(trainers + 1, expose=[far]) as workers:
        workers[0].run(train_together, trainers)
        assert_nothing_left(workers)


def train_together(trainers):
    server = gradwire.RRef(far.Server())
    running = [
        gradwire.rpc_async(
            f"w{n + 1}", far.train, args=(server, torch.optim.SGD, STEPS, n), timeout=SECONDS
        )
        for n in range(trainers)
    ]

    checked = sum(each.wait() for each in running)

    assert checked > STEPS * trainers / 2


@pytest.mark.slow
def test_trainers_over_two_owners_never_wait_for_each_other():
    """Each takes the owners in another order; what one holds the other wants."""
    with cluster(4, expose=[far]) as workers:
        workers[0].run(step_crosswise)
        assert_nothing_left(workers)


def test_an_alias_that_is_older_than_a_step_reaches_no_older_graph():
    with cluster(2, expose=[far]) as workers:
        workers[0].run(write_through_aliases)
        assert_nothing_left(workers)


def write_through_aliases():
    part, x = gradwire.remote("w1", far.Part, args=(1,)), torch.ones(4, dtype=torch.float64)
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, part.rpc_sync().refs(), lr=0.1)
    local, x.requires_grad = far.Part(1), True
    (expected,) = torch.autograd.grad(local(x).sum(), x)
    part.rpc_sync().remember()
    with gradwire.context():
        loss = part.rpc_sync().forward(x).sum()
        part.rpc_sync().slope()
        optimizer.step()
        part.rpc_sync().write_where_it_was(100)
        loss.backward()

    assert torch.equal(x.grad, expected)
    moved = [v - old for v, old in zip(part.rpc_sync().values(), local.values(), strict=True)]
    for by in moved:
        torch.testing.assert_close(by, torch.full_like(by, -0.1))


def step_crosswise():
    parts = [gradwire.remote(f"w{n}", far.Part, args=(n,)) for n in range(2)]
    orders = [parts, parts[::-1]]
    running = [
        gradwire.rpc_async(f"w{n + 2}", far.step_many, args=(order, 60))
        for n, order in enumerate(orders)
    ]
    for each in running:
        each.wait()

    moved = [part.rpc_sync().values()[0] - far.Part(n).values()[0] for n, part in enumerate(parts)]

    for by in moved:  # 120 steps of 1/128 each, none lost
        torch.testing.assert_close(by, torch.full_like(by, -120 / 128))
