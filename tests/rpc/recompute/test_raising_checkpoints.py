"""A checkpoint whose function raises leaves nothing on the thread that served it.

Up to torch 2.12 it ends only when the exception dies, which here outlives the call.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils import checkpoint as checkpoints

import gradwire
from gradwire.rpc.recompute.checkpoint_run import (
    CheckpointRun,
    Generators,
    current_checkpoint_run,
)
from gradwire.rpc.recompute.left_open import begun, end_left_open, opened
from gradwire.rpc.recompute.recording import Recording
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

KEPT: list[Exception] = []


def checkpoint_of_torch_2_12(function, x):
    """`checkpoint(function, x, use_reentrant=False)` as it was."""
    options = True, checkpoints.noop_context_fn, "default", False, True
    generator = checkpoints._checkpoint_without_reentrant_generator(function, *options, x)
    next(generator)
    result = function(x)
    next(generator, None)
    return result


def raises(x):
    raise ValueError("on purpose")


def raises_in_a_checkpoint(x):
    try:
        return checkpoint_of_torch_2_12(raises, x * 1)
    except ValueError as error:
        KEPT.append(error)
        raise


def catches_in_a_checkpoint(x):
    try:
        return checkpoint_of_torch_2_12(raises, x * 1)
    except ValueError as error:
        KEPT.append(error)
        return x * 2


def has_hooks(_=None):
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def caught_in_its_backward(x):
    def hook(gradient):
        with torch.enable_grad():
            catches_in_a_checkpoint(x)
        del KEPT[:]  # where torch would end it, too

    y = x * 1
    y.register_hook(hook)
    return y


def doubled(x):
    return x * 2


FUNCTIONS = [
    doubled,
    raises_in_a_checkpoint,
    catches_in_a_checkpoint,
    caught_in_its_backward,
    has_hooks,
]


def call(function, x):
    return gradwire.rpc_sync("w1", function, args=(x,))


def raised_by_a_call(x):
    with pytest.raises(ValueError, match="on purpose"):
        call(raises_in_a_checkpoint, x)


def caught_by_a_call(x):
    call(catches_in_a_checkpoint, x)


def caught_in_a_backward(x):
    call(caught_in_its_backward, x).sum().backward()


def caught_in_a_callback(x):
    gradwire.rpc_async("w1", doubled, args=(x,)).then(
        lambda future: catches_in_a_checkpoint(future.wait())
    ).wait()


@pytest.mark.parametrize(
    "program",
    [raised_by_a_call, caught_by_a_call, caught_in_a_callback, caught_in_a_backward],
    ids=lambda p: p.__name__,
)
def test_a_checkpoint_ends_with_the_call_whose_exception_lives_on(program):
    with cluster(2, expose=FUNCTIONS) as workers:
        workers[0].run(lambda: program(torch.ones(3, requires_grad=True)))

        # It dies here. Here nothing is to be removed: torch would raise that.
        del KEPT[:]

        assert_nothing_left(workers)
        assert not workers[0].run(lambda: any(call(has_hooks, None) for _ in range(20)))


def test_a_run_that_ends_on_another_thread_leaves_the_run_there():
    def run():
        return CheckpointRun(Generators(torch.Generator()), Recording(), is_recomputation=False)

    there, found = run().__enter__(), []

    def main():
        with run() as mine:
            there.__exit__(None, None, None)
            found.append(current_checkpoint_run() is mine)
        found.append(current_checkpoint_run() is None)

    thread = threading.Thread(target=main)
    try:
        thread.start()
        thread.join()
    finally:
        there.__exit__(None, None, None)

    assert found == [True, True]
    assert current_checkpoint_run() is None


def test_a_run_that_is_left_open_does_not_outlast_the_run_around_it():
    generators = Generators(torch.Generator())
    with CheckpointRun(generators, Recording(), is_recomputation=False):
        left = CheckpointRun(generators, Recording(), is_recomputation=False).__enter__()

    assert current_checkpoint_run() is None
    left.__exit__(None, None, None)
    assert current_checkpoint_run() is None


def test_what_was_open_before_stays_open():
    ended = []

    def checkpoint(name):
        try:
            yield
        finally:
            ended.append(name)
            if name == "inner":
                raise ValueError("on purpose")

    def opened_here(name):
        it = begun(checkpoint(name))
        next(it)
        return it

    outermost = opened_here("outermost")
    before = len(opened.checkpoints)
    outer, inner, done = map(opened_here, ("outer", "inner", "done"))
    next(done, None)
    end_left_open(before)

    assert ended == ["done", "inner", "outer"]
    del outer, inner, done
    outermost.close()
    del outermost
    assert opened.checkpoints == []
