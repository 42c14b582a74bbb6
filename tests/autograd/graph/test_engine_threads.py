"""A worker's backward uses the calling thread only; torch's switch stays as the user set it."""

from __future__ import annotations

import asyncio
import sys
from itertools import combinations

import pytest
import torch

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]
STEPS = 3
ORDERS = [
    [0 if n in first else 1 for n in range(2 * STEPS)]
    for first in combinations(range(2 * STEPS), STEPS)
]
"""every order in which two tasks can take their steps"""


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[HERE]) as made:
        yield made
        assert_nothing_left(made)


def is_threaded():
    return torch._C._is_multithreading_enabled()


def double(x):
    return x * 2


def seen_in_backward(y):
    """Differentiate it; whether the run might have used threads of the engine's own."""
    seen = []
    y.register_hook(lambda _: seen.append(is_threaded()))
    y.sum().backward()
    return seen


def steps_in_a_context():
    x = torch.ones(2, requires_grad=True)
    with gw.context():
        yield is_threaded()
        y = gw.rpc_sync("w1", double, args=(x,))
        assert seen_in_backward(y) == [False]
        assert x.grad.tolist() == [2.0, 2.0]
        yield is_threaded()
    yield is_threaded()


def steps_outside():
    for _ in range(STEPS):
        assert seen_in_backward(torch.ones(2, requires_grad=True) * 2) == [False]
        yield is_threaded()


async def taken_in_turns(order, programs):
    """Two tasks of asyncio on one thread, each taking a step when it is its turn."""
    turns = [asyncio.Queue() for _ in programs]
    seen = []

    async def task(turn, program):
        for threaded in program():
            seen.append(threaded)
            (await turn.get()).set()

    async with asyncio.TaskGroup() as group:  # one that fails ends the others
        for turn, program in zip(turns, programs, strict=True):
            group.create_task(task(turn, program))
        for whose in order:
            stepped = asyncio.Event()
            turns[whose].put_nowait(stepped)
            await stepped.wait()
    return seen


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("other", [steps_in_a_context, steps_outside], ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_tasks_that_take_turns_find_the_switch_as_the_user_set_it(workers, order, other, threaded):
    def program():
        with torch.autograd.set_multithreading_enabled(threaded):
            seen = asyncio.run(taken_in_turns(order, [steps_in_a_context, other]))
            assert seen == [threaded] * len(seen) == [threaded] * 2 * STEPS
            assert is_threaded() == threaded

    workers[0].run(program)


def test_a_run_that_fails_leaves_the_switch_as_it_was(workers):
    def program():
        before = is_threaded()
        with gw.context():
            x = torch.ones(2, requires_grad=True)
            y = gw.rpc_sync("w1", double, args=(x,))
            y.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
            assert is_threaded() == before

    workers[0].run(program)


def test_a_served_run_uses_one_thread_and_leaves_the_switch_as_it_was(workers):
    def program():
        with gw.context():
            x = torch.ones(2, requires_grad=True)
            gw.rpc_sync("w1", doubled_and_watched, args=(x,)).sum().backward()
        assert SEEN.pop() is False

    workers[0].run(program)


SEEN: list[bool] = []


def doubled_and_watched(x):
    y = x * 2
    y.register_hook(lambda _: SEEN.append(is_threaded()))
    return y
