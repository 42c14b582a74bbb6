"""Sends wait in an order that ends, whichever threads made the graph. See the note in graph.py.

A thread counts its nodes from 0, so all that matters here runs on threads that are new.
"""

from __future__ import annotations

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch

import gradwire as gw
from gradwire.autograd import crossing
from gradwire.autograd.contexts import Contexts
from gradwire.autograd.messages import Crossing
from gradwire.autograd.torch_private import sequence_number
from gradwire.ids import EdgeId
from gradwire.options import Options, Timeouts
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
PATIENCE = Options(timeouts=Timeouts(backward=5.0))
DEPTH = 50


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE], options=PATIENCE) as made:
        yield made
        assert_nothing_left(made)


def on_a_new_thread(function, *args):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result(30)


def in_context(workers, program):
    """Run a program on w0, in a context, on a thread that has made no node before."""

    def run():
        with gw.context():
            program()

    on_a_new_thread(workers[0].run, run)


def place(tensor):
    """Where in the engine's queue the tensor's node stands."""
    return sequence_number(tensor.grad_fn)


def next_place():
    """Where the next node of this thread would stand."""
    return place(torch.zeros((), requires_grad=True).view(()))


# -- what runs on the workers


def double(x):
    return x * 2


def doubled_over_there(x, times):
    for _ in range(times):
        x = gw.rpc_sync("w1", double, args=(x,))
    return x


# -- whole passes


@pytest.mark.parametrize("depths", [[1, 1, 1], [8, 1], [1, 8], [2, 6, 3], [4, 4, 4, 4]], ids=str)
def test_calls_of_a_pool_of_threads_may_feed_one_loss(workers, depths):
    def program():
        x = torch.ones(1, requires_grad=True)

        def pipeline(depth):
            y = x
            for step in range(depth):
                y = gw.rpc_sync(f"w{1 + step % 2}", double, args=(y,))
            return y

        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(copy_context().run, pipeline, depth) for depth in depths]
            received = [call.result(30) for call in calls]
        sum((y * 1).sum() for y in received).backward()
        assert x.grad.item() == sum(2**depth for depth in depths)

    in_context(workers, program)


def test_values_of_ones_own_that_other_threads_made_may_feed_one_loss(workers):
    def program():
        x = torch.ones(1, requires_grad=True)
        deep = gw.remote("w0", doubled_over_there, args=(x, 12))
        shallow = gw.remote("w0", doubled_over_there, args=(x, 1))
        a, b = deep.to_here(), shallow.to_here()
        ((a * 1).sum() + (b * 1 * 1).sum()).backward()
        assert x.grad.item() == 2**12 + 2

    in_context(workers, program)


# -- how far a thread is lifted


def nodes_made_by_waiting(future):
    """On a new thread: how many nodes the wait itself has made to lift the thread."""

    def wait():
        before = next_place()
        future.wait()
        return next_place() - before - 1

    return on_a_new_thread(wait)


def test_whoever_waits_for_a_callback_is_not_lifted_above_what_the_callback_threw_away(workers):
    def busy(_):
        seed = torch.zeros((), requires_grad=True)
        for _ in range(5000):
            seed.view(())
        return "no tensor"

    def program():
        x = torch.ones(1, requires_grad=True)
        assert nodes_made_by_waiting(gw.rpc_async("w1", double, args=(x,)).then(busy)) == 0

    in_context(workers, program)


def test_whoever_waits_for_a_callback_is_lifted_above_the_depth_of_what_it_returns(workers):
    def program():
        x = doubled_over_there(torch.ones(1, requires_grad=True), 10)
        future = gw.rpc_async("w1", double, args=(x,)).then(lambda done: [done.wait() * 2])

        def place_of_a_node():
            return place(future.wait()[0] * 2)

        assert nodes_made_by_waiting(future) <= 23
        assert on_a_new_thread(place_of_a_node) > 22  # 11 calls, there and back

    in_context(workers, program)


# -- single nodes, without workers


class NoWorker:
    """Nodes need a home to call in backward; here there is none."""


NO_WORKER = NoWorker()
HOME = weakref.ref(NO_WORKER)


@pytest.fixture
def context():
    return Contexts(0, "w0").new()


def arrive(context):
    crossed = Crossing(EdgeId(1, 0), DEPTH, {1: b"\x01"}, [0])
    tensors = [torch.ones(2)]
    crossing.arrive(context, HOME, 0, 1, crossed, tensors)
    return tensors[0]


def test_a_recv_made_on_a_new_thread_stands_above_its_depth(context):
    def receive():
        assert next_place() < DEPTH
        return place(arrive(context))

    assert on_a_new_thread(receive) > DEPTH


def test_what_is_made_after_a_recv_stands_above_its_depth(context):
    def receive_and_go_on():
        arrive(context)
        return next_place()

    assert on_a_new_thread(receive_and_go_on) > DEPTH


def test_what_another_thread_made_of_it_is_lifted_when_it_is_sent_on(context):
    received = arrive(context)

    def make():
        first = received * 2
        return first, first.sin()

    made = on_a_new_thread(make)
    assert all(place(tensor) < DEPTH for tensor in made)
    crossed = crossing.leave(context, HOME, 0, 1, [0], [made[-1]])

    assert all(place(tensor) > DEPTH for tensor in made)
    assert crossed.depth == sequence_number(context.sent[0].node) == DEPTH + 1
