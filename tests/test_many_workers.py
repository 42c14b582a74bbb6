"""A hundred workers in one process exchange calls and run one backward over all of them."""

from __future__ import annotations

import sys

import pytest
import torch

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
COUNT = 100
WEIGHTS: dict[int, torch.Tensor] = {}


@pytest.fixture(scope="module")
def workers():
    with cluster(COUNT, expose=[HERE]) as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(workers):
    WEIGHTS.update({n: weight(n) for n in range(COUNT)})
    yield
    WEIGHTS.clear()
    assert_nothing_left(workers)


def weight(n):
    """1 or -1, so that long products stay exact."""
    return torch.tensor([1.0, -1.0 if n % 3 else 1.0], dtype=torch.float64, requires_grad=True)


# -- what runs on the workers


def number():
    return gw.get_worker_info().id


def along(x, last):
    """Over this worker and all that follow it."""
    x = x * WEIGHTS[number()] + number()
    return x if number() == last else gw.rpc_sync(number() + 1, along, args=(x, last))


def weighted(x):
    return x * WEIGHTS[number()]


def weighted_by_the_next(x):
    return gw.rpc_sync((number() + 1) % COUNT, weighted, args=(x * WEIGHTS[number()],))


def collect(others):
    return sum(gw.rpc_sync(other, number) for other in others)


# -- the same in one process


def along_here(x, weights):
    for n in range(COUNT):
        x = x * weights[n] + n
    return x


def differentiated(program):
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    program(x).sum().backward()
    return x.grad


def assert_all_equal(weights):
    for n in range(COUNT):
        assert WEIGHTS[n].grad is not None, f"w{n} got no gradient"
        assert torch.equal(WEIGHTS[n].grad, weights[n].grad), f"w{n}"


@pytest.mark.slow
def test_every_worker_calls_the_others(workers):
    for n in range(0, COUNT, 7):
        others = [(n + step) % COUNT for step in (1, 10, 50)]
        assert workers[n].run(gw.rpc_sync, others[0], collect, args=(others,)) == sum(others)


@pytest.mark.slow
def test_backward_walks_back_a_chain_over_all_workers(workers):
    def program():
        with gw.context():
            return differentiated(lambda x: gw.rpc_sync(0, along, args=(x, COUNT - 1)))

    gradient = workers[0].run(program)

    weights = {n: weight(n) for n in range(COUNT)}
    assert torch.equal(gradient, differentiated(lambda x: along_here(x, weights)))
    assert_all_equal(weights)


@pytest.mark.slow
def test_backward_reaches_all_workers_of_a_star(workers):
    def program():
        with gw.context():

            def joined(x):
                under_way = [gw.rpc_async(n, weighted, args=(x,)) for n in range(COUNT)]
                return sum(future.wait() * n for n, future in enumerate(under_way))

            return differentiated(joined)

    gradient = workers[COUNT // 2].run(program)

    weights = {n: weight(n) for n in range(COUNT)}
    expected = differentiated(lambda x: sum(x * weights[n] * n for n in range(COUNT)))
    assert torch.equal(gradient, expected)
    assert_all_equal(weights)


@pytest.mark.slow
def test_backward_reaches_all_workers_of_a_ring_in_the_map(workers):
    def program():
        x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
        with gw.context() as context:
            under_way = [gw.rpc_async(n, weighted_by_the_next, args=(x,)) for n in range(COUNT)]
            loss = sum(future.wait().sum() for future in under_way)
            gw.backward(context, [loss])
            found = [
                m.run(gw.get_gradients, context).get(WEIGHTS[n]) for n, m in enumerate(workers)
            ]
            return gw.get_gradients(context)[x], found

    gradient, found = workers[0].run(program)

    weights = {n: weight(n) for n in range(COUNT)}
    expected = differentiated(
        lambda x: sum(x * weights[n] * weights[(n + 1) % COUNT] for n in range(COUNT))
    )
    assert torch.equal(gradient, expected)
    for n in range(COUNT):
        assert WEIGHTS[n].grad is None
        assert torch.equal(found[n], weights[n].grad)


@pytest.mark.slow
def test_each_of_many_workers_runs_a_backward_of_its_own(workers):
    def program(n):
        with gw.context():
            others = [(n + step) % COUNT for step in (1, 2, 3)]
            return differentiated(
                lambda x: sum(gw.rpc_sync(to, weighted, args=(x,)) for to in others)
            )

    for n in range(0, COUNT, 4):
        others = [WEIGHTS[(n + step) % COUNT].detach() for step in (1, 2, 3)]
        assert torch.equal(workers[n].run(program, n), sum(others))
