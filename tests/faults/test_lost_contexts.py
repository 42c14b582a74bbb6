"""A connection that ends inside a context: an error, never a gradient that lacks a part."""

from __future__ import annotations

import sys

import pytest
import torch

import gradwire
from gradwire import PeerLost
from gradwire.ids import opener_of
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made
        assert_nothing_left(made)


def doubled(x):
    return x * 2


def doubled_by(worker, x):
    return gradwire.rpc_sync(worker, doubled, args=(x,))


def _cut(workers, one, other):
    """Both notice, and both can connect again."""
    for near, far in ((one, other), (other, one)):
        workers[near].worker.agent.hang_up(far, "a test has cut it")
    contexts = workers[other].worker.engine.contexts
    assert eventually(lambda: one not in map(opener_of, contexts.all()))


def test_a_worker_that_has_dropped_a_context_takes_no_part_in_it_again(workers):
    def train():
        x = torch.ones(1, requires_grad=True)
        with gradwire.context():
            first = gradwire.rpc_sync("w1", doubled, args=(x,))
            _cut(workers, 0, 1)
            lost = "PeerLost on w1: w1 has lost w0, and dropped c0.0 and its graph"
            with pytest.raises(PeerLost, match=lost):
                gradwire.rpc_sync("w1", doubled, args=(first,))

    workers[0].run(train)
    assert workers[0].run(_gradient, "w1") == 2


def test_nor_if_another_worker_asks_it_to(workers):
    def train():
        x = torch.ones(1, requires_grad=True)
        with gradwire.context():
            gradwire.rpc_sync("w2", doubled, args=(x,))
            _cut(workers, 0, 2)
            with pytest.raises(PeerLost, match="w2 has lost w0, and dropped"):
                gradwire.rpc_sync("w1", doubled_by, args=("w2", x))

    workers[0].run(train)
    assert workers[0].run(_gradient, "w2") == 2


def test_nor_those_whom_it_has_told(workers):
    def train():
        x = torch.ones(1, requires_grad=True)
        with gradwire.context():
            gradwire.rpc_sync("w1", doubled_by, args=("w2", x))
            _cut(workers, 0, 1)
            contexts = workers[2].worker.engine.contexts
            assert eventually(lambda: 0 not in map(opener_of, contexts.all()))
            with pytest.raises(PeerLost, match="w2 has lost w0, and dropped"):
                gradwire.rpc_sync("w2", doubled, args=(x,))

    workers[0].run(train)


def test_an_opener_that_others_have_lost_cannot_differentiate_any_more(workers):
    def train():
        x = torch.ones(1, requires_grad=True)
        with gradwire.context():
            y = gradwire.rpc_sync("w1", doubled_by, args=("w0", x))
            context = workers[0].worker.engine.contexts
            _cut(workers, 0, 1)
            assert eventually(lambda: context.maybe(context.all()[0]).broken)
            with pytest.raises((PeerLost, gradwire.UsageError), match="w1"):
                y.backward()

    workers[0].run(train)
    assert workers[0].run(_gradient, "w1") == 2


def _gradient(worker):
    x = torch.ones(1, requires_grad=True)
    with gradwire.context():
        gradwire.rpc_sync(worker, doubled, args=(x,)).backward()
    return x.grad.item()
