"""Sends wait in an order that ends, whichever threads made the graph.

See the note in graph/walk.py.

A thread counts its nodes from 0, so all that matters here runs on threads that are new.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial

import pytest
import torch

import gradwire as gw
from gradwire.autograd.graph import crossing
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.lineage import one, to_wire
from gradwire.autograd.messages import Crossing
from gradwire.ids import EdgeId
from gradwire.options import Options, Timeouts
from gradwire.testing import cluster
from gradwire.torch_private import sequence_number
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


@pytest.fixture(params=[gw.context, nullcontext], ids=["in a context", "in no context"])
def on_w0(workers, request):
    """Runs a program on w0, on a thread that has made no node before."""

    def run(program):
        with request.param():
            program()

    return lambda program: on_a_new_thread(workers[0].run, run, program)


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
def test_calls_of_a_pool_of_threads_may_feed_one_loss(on_w0, depths):
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

    on_w0(program)


def test_values_of_ones_own_that_other_threads_made_may_feed_one_loss(on_w0):
    def program():
        x = torch.ones(1, requires_grad=True)
        deep = gw.remote("w0", doubled_over_there, args=(x, 12))
        shallow = gw.remote("w0", doubled_over_there, args=(x, 1))
        a, b = deep.to_here(), shallow.to_here()
        ((a * 1).sum() + (b * 1 * 1).sum()).backward()
        assert x.grad.item() == 2**12 + 2

    on_w0(program)


# -- operators that other threads run


def in_a_fresh_thread(function):
    """As a thread of its own does it: in no context, with a count of nodes that begins at 0."""
    return on_a_new_thread(function)


def in_a_fresh_thread_of_the_context(function):
    return on_a_new_thread(copy_context().run, function)


def in_a_thread_of_asyncio(function):
    return asyncio.run(asyncio.to_thread(function))


ELSEWHERE = [in_a_fresh_thread, in_a_fresh_thread_of_the_context, in_a_thread_of_asyncio]


def chain(x, depth):
    for step in range(depth):
        x = gw.rpc_sync(f"w{1 + step % 2}", double, args=(x,))
    return x


@pytest.mark.parametrize("elsewhere", ELSEWHERE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("depths", [[4, 1], [1, 4], [8, 2, 5], [12, 3, 1, 7]], ids=str)
def test_a_loss_may_be_made_by_threads_that_received_nothing(on_w0, elsewhere, depths):
    def program():
        x = torch.ones(1, requires_grad=True)
        received = [chain(x, depth) for depth in depths]
        terms = [elsewhere(lambda y=y: (y * 3).sum()) for y in received]
        elsewhere(lambda: sum(terms)).backward()
        assert x.grad.item() == 3 * sum(2**depth for depth in depths)

    on_w0(program)


@pytest.mark.parametrize("elsewhere", ELSEWHERE, ids=lambda f: f.__name__)
def test_a_backward_itself_may_run_in_a_thread_that_received_nothing(on_w0, elsewhere):
    def program():
        x = torch.ones(1, requires_grad=True)
        deep, shallow = chain(x, 6), chain(x, 1)
        loss = elsewhere(lambda: deep.sin().sum() + (shallow * 2).sum())
        elsewhere(loss.backward)
        torch.testing.assert_close(x.grad, torch.tensor([64 * math.cos(64.0) + 4]))

    on_w0(program)


def test_a_loss_made_elsewhere_may_be_differentiated_twice(on_w0):
    def program():
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        deep, shallow = chain(x, 5), chain(x, 1)
        loss = in_a_fresh_thread(lambda: (deep**3).sum() + (shallow**3).sum())
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(in_a_fresh_thread(lambda: (first * 1).sum()), x)
        assert first.item() == 3 * (32**3 + 2**3)
        assert second.item() == 6 * (32**3 + 2**3)

    on_w0(program)


def test_a_loss_made_elsewhere_goes_into_the_map_too(workers):
    def program(context_id):
        x = torch.ones(1, requires_grad=True)
        deep, shallow = chain(x, 6), chain(x, 1)
        loss = in_a_fresh_thread(lambda: (deep * 3).sum() + (shallow * 3).sum())
        gw.backward(context_id, [loss])
        assert gw.get_gradients(context_id)[x].item() == 3 * (64 + 2)

    def run():
        with gw.context() as context_id:
            program(context_id)

    on_a_new_thread(workers[0].run, run)


def double_elsewhere(x):
    """Each operator on the callee is run by a fresh thread."""
    return in_a_fresh_thread(lambda: x * 2)


def sum_of_chains(x, depths):
    """A callee that calls on, and adds up in a fresh thread what it received."""
    terms = [x]
    for depth in depths:
        y = x
        for step in range(depth):
            y = gw.rpc_sync(f"w{step % 2}", double_elsewhere, args=(y,))
        terms.append(in_a_fresh_thread(lambda y=y: y * 3))
    return in_a_fresh_thread(lambda: sum(terms))


def test_workers_that_serve_a_pass_may_use_other_threads_as_well(on_w0):
    def program():
        x = torch.ones(1, requires_grad=True)
        y = gw.rpc_sync("w2", sum_of_chains, args=(x, [5, 1, 3]))
        z = gw.rpc_sync("w2", sum_of_chains, args=(y, [1, 4]))
        in_a_fresh_thread(lambda: (y * 1 + z * 1).sum()).backward()
        inner, outer = 1 + 3 * (32 + 2 + 8), 1 + 3 * (2 + 16)
        assert x.grad.item() == inner + inner * outer

    on_w0(program)


def random_loss(rng, hop, elsewhere):
    """A program of chains that branch and join, each operator in this thread or in another."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    values = [x * 1]
    for _ in range(rng.randint(3, 6)):
        value = rng.choice(values)
        for _ in range(rng.randint(1, 4)):
            value = hop(value, rng.randint(1, 2))
            if rng.random() < 0.5:
                value = elsewhere(lambda value=value: value * 1)
        values.append(value)
    parts = [elsewhere(lambda value=value: value * 1) for value in values]
    while len(parts) > 1:
        rng.shuffle(parts)
        a, b = parts.pop(), parts.pop()
        parts.append(elsewhere(partial(torch.add, a, b)) if rng.random() < 0.8 else a + b)
    return x, parts[0].sum()


def remote_hop(value, worker):
    return gw.rpc_sync(f"w{worker}", double, args=(value,))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(n, n + 10) for n in range(0, 40, 10)], ids=str)
def test_operators_of_threads_drawn_at_random_end_as_in_one_process(on_w0, seeds):
    """Fresh threads: the nodes of a pool's thread soon stand above every depth."""
    for seed in seeds:
        local, loss = random_loss(random.Random(seed), lambda v, _: v * 2, lambda f: f())
        loss.backward()

        def program(seed=seed, local=local):
            x, loss = random_loss(random.Random(seed), remote_hop, in_a_fresh_thread)
            loss.backward()
            assert torch.equal(x.grad, local.grad)

        on_w0(program)


# -- runs that Python does not begin


def begun_by_cpp(loss, leaf):
    """TorchScript calls torch's engine from C++, so that nobody can number the nodes before."""
    script = torch.jit.CompilationUnit(
        "def f(loss: Tensor, leaf: Tensor):\n"
        "    return torch.autograd.grad([loss], [leaf], None, True)\n"
    )
    return script.f(loss, leaf)[0]


def test_a_backward_that_cpp_code_begins_is_exact_where_its_own_thread_made_the_loss(on_w0):
    def program():
        x = torch.ones(1, requires_grad=True)
        loss = (chain(x, 8) * 3).sum() + chain(x, 2).sum() + chain(x, 5).sum()
        assert begun_by_cpp(loss, x).item() == 3 * 2**8 + 2**2 + 2**5

    on_w0(program)


def test_a_backward_that_cpp_code_begins_says_at_once_that_it_is_out_of_order(on_w0):
    def program():
        x = torch.ones(1, requires_grad=True)
        received = [chain(x, depth) for depth in (8, 2, 5)]
        terms = [in_a_fresh_thread(lambda y=y: (y * 3).sum()) for y in received]
        loss = in_a_fresh_thread(lambda: sum(terms))
        words = r"waits for gradients before .* has sent its own(.|\n)*hint: begin it with loss"
        with pytest.raises(RuntimeError, match=words):  # TorchScript makes one of any exception
            begun_by_cpp(loss, x)
        (again,) = torch.autograd.grad(loss, x)
        assert again.item() == 3 * (2**8 + 2**2 + 2**5)

    on_w0(program)


def test_a_backward_inside_of_another_that_fails_leaves_the_order_as_it_was(on_w0):
    @torch.enable_grad()
    def fails(_):
        y = torch.ones(1, requires_grad=True) * 2
        y.register_hook(lambda _: 1 / 0)
        other = torch.ones(1, requires_grad=True).exp()
        with pytest.raises(ZeroDivisionError):
            (y.sum() + other.sin().sum()).backward()

    def program():
        x = torch.ones(1, requires_grad=True)
        received = [chain(x, depth) for depth in (8, 2, 5)]
        terms = [in_a_fresh_thread(lambda y=y: (y * 3).sum()) for y in received]
        for term in terms:
            term.register_hook(fails)
        in_a_fresh_thread(lambda: sum(terms)).backward()
        assert x.grad.item() == 3 * (2**8 + 2**2 + 2**5)

    on_w0(program)


def test_losses_that_share_what_other_threads_made_may_run_at_once(on_w0):
    """A node's number changes at most once, before the first run that reaches it."""

    def program():
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        received = [chain(x, depth) for depth in (6, 2, 4)]
        shared = [in_a_fresh_thread(lambda y=y: y * 3) for y in received]
        sent_on = chain(in_a_fresh_thread(lambda: shared[0] + shared[1]), 3)
        a = in_a_fresh_thread(lambda: (sent_on + shared[2]).sum())
        b = in_a_fresh_thread(lambda: (shared[0] * 2 + shared[2]).sum())
        expected = [8 * 3 * (64 + 4) + 3 * 16, 2 * 3 * 64 + 3 * 16]
        with ThreadPoolExecutor(4) as threads:
            runs = [
                threads.submit(torch.autograd.grad, loss, x, retain_graph=True)
                for loss in (a, b) * 4
            ]
            assert [run.result(30)[0].item() for run in runs] == expected * 4

    on_w0(program)


# -- how far a thread is lifted


def nodes_made_by_waiting(future):
    """On a new thread: how many nodes the wait itself has made to lift the thread."""

    def wait():
        before = next_place()
        future.wait()
        return next_place() - before - 1

    return on_a_new_thread(wait)


def test_whoever_waits_for_a_callback_is_not_lifted_above_what_the_callback_threw_away(on_w0):
    def busy(_):
        seed = torch.zeros((), requires_grad=True)
        for _ in range(5000):
            seed.view(())
        return "no tensor"

    def program():
        x = torch.ones(1, requires_grad=True)
        assert nodes_made_by_waiting(gw.rpc_async("w1", double, args=(x,)).then(busy)) == 0

    on_w0(program)


def test_whoever_waits_for_a_callback_is_lifted_above_the_depth_of_what_it_returns(on_w0):
    def program():
        x = doubled_over_there(torch.ones(1, requires_grad=True), 10)
        future = gw.rpc_async("w1", double, args=(x,)).then(lambda done: [done.wait() * 2])

        def place_of_a_node():
            return place(future.wait()[0] * 2)

        assert nodes_made_by_waiting(future) <= 23
        assert on_a_new_thread(place_of_a_node) > 22  # 11 calls, there and back

    on_w0(program)


# -- single nodes, without workers


class NoWorker:
    """Nodes need a home to call in backward; here there is none."""


NO_WORKER = NoWorker()
HOME = weakref.ref(NO_WORKER)


@pytest.fixture
def edges():
    made = Edges(0, 0, 1000, threading.RLock())
    yield made
    made.clear()


def arrive(edges):
    crossed = Crossing(EdgeId(1, 0), DEPTH, to_wire(one(EdgeId(1, 0))), [0])
    tensors = [torch.ones(2)]
    crossing.arrive(edges, HOME, None, 1, crossed, tensors)
    return tensors[0]


def test_a_recv_made_on_a_new_thread_stands_above_its_depth(edges):
    def receive():
        assert next_place() < DEPTH
        return place(arrive(edges))

    assert on_a_new_thread(receive) > DEPTH


def test_what_is_made_after_a_recv_stands_above_its_depth(edges):
    def receive_and_go_on():
        arrive(edges)
        return next_place()

    assert on_a_new_thread(receive_and_go_on) > DEPTH


def test_what_another_thread_made_of_it_is_lifted_when_it_is_sent_on(edges):
    received = arrive(edges)

    def make():
        first = received * 2
        return first, first.sin()

    made = on_a_new_thread(make)
    assert all(place(tensor) < DEPTH for tensor in made)
    crossed = crossing.leave(edges, HOME, None, 1, [0], [made[-1]], 0.0, None)

    assert all(place(tensor) > DEPTH for tensor in made)
    assert crossed.depth == sequence_number(edges.sent[0].node) == DEPTH + 1
