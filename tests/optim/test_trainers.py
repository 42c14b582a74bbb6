"""Several trainers, in contexts of their own or in none, share one module."""

from __future__ import annotations

import contextlib

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
@pytest.mark.timeout(300)
def test_without_a_context_steps_of_others_leave_every_gradient_exact_too():
    with cluster(4, expose=[far]) as workers:
        workers[0].run(differentiate_together, 3)
        assert_nothing_left(workers)


def differentiate_together(trainers):
    server = gradwire.RRef(far.Server())
    server.local_value().slope()
    running = [
        gradwire.rpc_async(f"w{n + 1}", far.differentiate, args=(server, STEPS, n), timeout=SECONDS)
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


@pytest.mark.parametrize("block", [gradwire.context, contextlib.nullcontext])
def test_an_alias_that_is_older_than_a_step_reaches_no_older_graph(block):
    with cluster(2, expose=[far]) as workers:
        workers[0].run(write_through_aliases, block)
        assert_nothing_left(workers)


def write_through_aliases(block):
    part, x = gradwire.remote("w1", far.Part, args=(1,)), torch.ones(4, dtype=torch.float64)
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, part.rpc_sync().refs(), lr=0.1)
    local, x.requires_grad = far.Part(1), True
    (expected,) = torch.autograd.grad(local(x).sum(), x)
    part.rpc_sync().remember()
    with block():
        loss = part.rpc_sync().forward(x).sum()
        part.rpc_sync().slope()
        optimizer.step()
        part.rpc_sync().write_where_it_was(100)
        loss.backward()

    assert torch.equal(x.grad, expected)
    moved = [v - old for v, old in zip(part.rpc_sync().values(), local.values(), strict=True)]
    for by in moved:
        torch.testing.assert_close(by, torch.full_like(by, -0.1))


def test_a_gradient_s_own_graph_keeps_the_weights_of_its_pass():
    """The engine makes it on the owner, in a run for another worker."""
    with cluster(2, expose=[far]) as workers:
        workers[0].run(step_between_two_orders)
        assert_nothing_left(workers)


def step_between_two_orders():
    part, x = gradwire.remote("w1", far.Part, args=(1,)), torch.ones(4, dtype=torch.float64)
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, part.rpc_sync().refs(), lr=0.1)
    local, x.requires_grad = far.Part(1), True
    (expected,) = torch.autograd.grad(local(x).sum(), x, create_graph=True)
    expected.square().sum().backward()
    second, x.grad = x.grad, None

    (first,) = torch.autograd.grad(part.rpc_sync().forward(x).sum(), x, create_graph=True)
    part.rpc_sync().slope()
    optimizer.step()
    optimizer.zero_grad()
    first.square().sum().backward()

    assert torch.equal(first, expected)
    assert torch.equal(x.grad, second)
    found = part.rpc_sync().grads()
    assert all(torch.equal(g, p.grad) for g, p in zip(found, local.parameters(), strict=True))


@pytest.mark.parametrize("block", [gradwire.context, contextlib.nullcontext])
def test_a_graph_of_a_callback_keeps_the_weights_it_used(block):
    with cluster(2, expose=[far]) as workers:
        workers[0].run(step_under_a_callback, block)
        assert_nothing_left(workers)


def step_under_a_callback(block):
    part, x = gradwire.remote("w1", far.Part, args=(1,)), torch.ones(4, dtype=torch.float64)
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, part.rpc_sync().refs(), lr=0.1)
    local, x.requires_grad = far.Part(1), True
    (expected,) = torch.autograd.grad(local(x).sum(), x)
    with block():
        loss = part.rpc_sync().forward_later(x).sum()
        part.rpc_sync().slope()
        optimizer.step()
        loss.backward()

    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("block", [gradwire.context, contextlib.nullcontext])
def test_a_module_that_was_frozen_in_the_forward_and_is_stepped_then_is_no_other(block):
    with cluster(2) as workers:
        workers[0].run(freeze_and_step, block)
        assert_nothing_left(workers)


def freeze_and_step(block):
    module = gradwire.RemoteModule("w1", torch.nn.Linear, (3, 2))
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    x = torch.ones(3, requires_grad=True)
    module(x).sum().backward()
    expected, x.grad = x.grad, None

    module.requires_grad_(False)
    with block():
        loss = module(x).sum()
        module.requires_grad_(True)
        optimizer.step()
        loss.backward()

    assert torch.equal(x.grad, expected)
    (after,) = torch.autograd.grad(module(x).sum(), x)
    assert not torch.equal(after, expected)


@pytest.mark.parametrize("by", ["w0", "w1"])
def test_a_graph_of_the_program_s_own_fails_after_a_step_as_in_torch(by):
    with cluster(2, expose=[far]) as workers:
        workers[0].run(step_under_a_graph, by)
        assert_nothing_left(workers)


def step_under_a_graph(by):
    part, x = far.Part(1), torch.ones(4, dtype=torch.float64, requires_grad=True)
    owned = gradwire.RRef(part)
    gradwire.rpc_sync(by, far.step_many, args=([owned], 0))  # from now on it is stepped here
    loss = part(x).sum()
    gradwire.rpc_sync(by, far.step_many, args=([owned], 1))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
