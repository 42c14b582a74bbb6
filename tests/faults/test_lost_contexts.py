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


def test_what_was_made_before_the_loss_says_so_and_what_is_made_after_it_is_exact(workers):
    def train():
        x = torch.ones(1, requires_grad=True)
        with gradwire.context():
            first = gradwire.rpc_sync("w1", doubled, args=(x,))
            _cut(workers, 0, 1)
            second = gradwire.rpc_sync("w1", doubled, args=(x,))
            with pytest.raises(PeerLost, match=r"e0\.0 was dropped here: w1 was lost"):
                (first + second).backward()
            second.backward(retain_graph=True)
            assert x.grad == 2
            with pytest.raises(PeerLost, match="lost"):
                gradwire.rpc_sync("w1", doubled, args=(first,)).backward()

    workers[0].run(train)
    assert workers[0].run(_gradient, "w1") == 2


@pytest.mark.parametrize("route", [("w1",), ("w2", "w1")], ids=["by its opener", "by another"])
def test_no_gradients_go_into_the_map_of_a_context_that_was_dropped(workers, route):
    def train():
        x = torch.ones(1, requires_grad=True)
        with gradwire.context() as context:
            gradwire.rpc_sync("w1", doubled, args=(x,))
            _cut(workers, 0, 1)
            if len(route) == 1:
                y = gradwire.rpc_sync("w1", doubled, args=(x,))
            else:
                y = gradwire.rpc_sync("w2", doubled_by, args=("w1", x))
            with pytest.raises(gradwire.ContextClosed, match="closed on w1, as w0 was lost"):
                gradwire.backward(context, [y])
            assert not gradwire.get_gradients(context)

    workers[0].run(train)
    assert workers[0].run(_gradient, "w1") == 2


def _gradient(worker):
    x = torch.ones(1, requires_grad=True)
    with gradwire.context():
        gradwire.rpc_sync(worker, doubled, args=(x,)).backward()
    return x.grad.item()
