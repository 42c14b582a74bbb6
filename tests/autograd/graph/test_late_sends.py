"""Sends are made once their message has left; see the note of that name in graph/edges.py."""

from __future__ import annotations

import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import gradwire as gw
from gradwire.autograd.graph import crossing
from gradwire.autograd.graph.edges import Edges
from gradwire.errors import UsageError
from gradwire.testing import cluster
from gradwire.torch_private import sequence_number
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]


class NoWorker:
    """Nodes need a home to call in backward; here there is none."""


NO_WORKER = NoWorker()
HOME = weakref.ref(NO_WORKER)


@pytest.fixture
def edges():
    made = Edges(0, 0, 50, threading.RLock())
    yield made
    made.clear()


def leave(edges, *tensors):
    crossed = crossing.leave(
        edges, HOME, None, 1, list(range(len(tensors))), list(tensors), 0.0, None
    )
    return edges.sent[crossed.edge.n]


def leaf():
    return torch.ones(2, requires_grad=True)


def test_a_send_is_made_when_its_message_has_left_and_only_once(edges):
    x = leaf()
    sent = leave(edges, x * 2, x)
    assert sent.token is None

    edges.make_sends([sent.edge])
    token = sent.token
    edges.make_sends([sent.edge])

    assert token is not None
    assert edges.token_of(sent) is token
    assert sent.make is None  # it holds the tensors no more
    assert sequence_number(token.grad_fn) == sent.depth
    names = [node.name() for node, _ in token.grad_fn.next_functions if node is not None]
    assert names == ["MulBackward0", "torch::autograd::AccumulateGrad"]


def test_threads_that_need_a_send_at_once_get_the_same(edges):
    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            sent = leave(edges, leaf() * 2)
            begin = threading.Barrier(8)

            def token(sent=sent, begin=begin):
                begin.wait()
                return edges.token_of(sent)

            found = [future.result() for future in [pool.submit(token) for _ in range(8)]]
            assert all(one is sent.token for one in found)


@pytest.mark.parametrize("change", [lambda y: y.mul_(3), lambda y: y.detach_()])
def test_a_tensor_that_was_changed_before_its_send_was_made_is_an_error(edges, change):
    y = leaf() * 2
    sent = leave(edges, y)
    change(y)
    edges.make_sends([sent.edge])

    for _ in range(2):
        with pytest.raises(UsageError, match=r"changed by another thread .* e0\.0"):
            edges.token_of(sent)


def test_a_leaf_may_be_written_to_before_its_send_is_made(edges):
    x = leaf()
    sent = leave(edges, x)
    with torch.no_grad():
        x.mul_(3)

    assert edges.token_of(sent).grad_fn.next_functions[0][0].variable is x


def test_what_was_released_before_its_send_was_made_leaves_nothing(edges):
    y = leaf() * 2
    sent = leave(edges, y)
    tensor = weakref.ref(y)
    edges.release([sent.edge.n], by=1)
    edges.make_sends([sent.edge])
    del sent, y

    assert not edges.sent
    assert tensor() is None


# -- in a cluster


def doubled(x):
    return 2 * x


def through(x, to):
    return gw.rpc_sync(to, doubled, args=(3 * x,))


class Watching:
    """An interceptor that asks something whenever a message leaves."""

    def __init__(self, ask):
        self.ask, self.found = ask, []

    def send(self, to, channel, frame, deadline):
        self.found.append(self.ask())
        channel.send(frame, deadline)

    def around(self, frame, registered, run):
        return registered, run

    def take_answer(self, take, worker, channel, frame):
        take(worker, frame)


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made
        assert_nothing_left(made)


def loss_of(x):
    return gw.rpc_sync("w1", through, args=(x, "w2")).sum()


def gradients(workers):
    x = leaf()

    def program():
        with gw.context() as context:
            gw.backward(context, [loss_of(x)])
            into_map = gw.get_gradients(context)[x]
        loss_of(x).backward()
        (first,) = torch.autograd.grad(loss_of(x * x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return [into_map.tolist(), x.grad.tolist(), first.tolist(), second.tolist()]

    return workers[0].run(program)


EXACT = [[6, 6], [6, 6], [12, 12], [12, 12]]


def test_arguments_and_results_leave_before_their_sends_are_made(workers):
    asked = []
    for member in workers:
        sent = member.worker.engine.edges.sent
        asked.append(
            Watching(lambda sent=sent: [one.token is None for one in sent.copy().values()])
        )
        member.worker.agent.interceptor = asked[-1]

    def program():
        loss_of(leaf()).backward()

    workers[0].run(program)
    for watching in asked:
        assert [True] in watching.found


def test_the_first_that_needs_a_send_makes_it(workers, monkeypatch):
    """As if every thread were interrupted just after its message has left."""
    for member in workers:
        monkeypatch.setattr(member.worker.engine, "left", lambda crossings: None)

    assert gradients(workers) == EXACT


def test_made_in_time_they_lead_to_the_same(workers):
    assert gradients(workers) == EXACT
