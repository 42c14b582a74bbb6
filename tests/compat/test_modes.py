"""Grad mode and inference mode stay with the caller, as in torch.distributed.rpc.

What each test expects was seen with torch itself, two processes of which ran these functions.
"""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn

from gradwire.compat import autograd as dist_autograd
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

MODES = [torch.no_grad, torch.inference_mode]
W = torch.ones(2, requires_grad=True)


@pytest.fixture(scope="module")
def workers():
    with cluster(2, behavior=TORCH) as made:
        yield made
        assert_nothing_left(made)


# -- what the workers run


class Trainer:
    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train(x):
    return Trainer().step(x)


def modes(*_):
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def modes_one_call_on(to):
    with torch.no_grad():
        return rpc.rpc_sync(to, modes)


def times_own(x):
    return x * W


def own():
    return W


def gradient_here(x):
    """A backward of the callee's own."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(x.square().sum(), x)
    return gradient


CALLS = {
    "rpc_sync": lambda function, *args: rpc.rpc_sync("w1", function, args=args),
    "rpc_async": lambda function, *args: rpc.rpc_async("w1", function, args=args).wait(),
    "remote": lambda function, *args: rpc.remote("w1", function, args=args).to_here(),
}


# -- the callee


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_training_step_runs_for_a_caller_that_evaluates(workers, mode, how):
    def program():
        with mode():
            return CALLS[how](train, torch.ones(4, 2))

    assert workers[0].run(program) >= 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_a_method_trains_for_a_caller_that_evaluates(workers, how, mode):
    def program():
        reference = rpc.remote("w1", Trainer)
        with mode():
            called = getattr(reference, how)().step(torch.ones(4, 2))
            if how == "rpc_async":
                return called.wait()
            return called if how == "rpc_sync" else called.to_here()

    assert workers[0].run(program) >= 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("to", ["w0", "w1"])
def test_the_callee_runs_in_the_modes_of_a_fresh_thread(workers, mode, to):
    def program():
        with mode():
            return rpc.rpc_sync(to, modes), rpc.rpc_sync(to, modes_one_call_on, args=("w0",))

    assert workers[0].run(program) == ((True, False), (True, False))


def test_a_tensor_made_in_inference_mode_arrives_as_one_that_can_be_differentiated(workers):
    def program():
        with torch.inference_mode():
            x = torch.full((2,), 3.0)
            weight = nn.Parameter(torch.ones(2))
            got = rpc.rpc_sync("w1", gradient_here, args=(x,))
            with dist_autograd.context():
                again = rpc.rpc_sync("w1", gradient_here, args=(weight,))
        return got.tolist(), got.is_inference(), again.tolist()

    assert workers[0].run(program) == ([6.0, 6.0], False, [2.0, 2.0])


# -- the caller


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("function", "given"), [(times_own, 1), (own, 0)])
def test_a_caller_that_does_not_record_gets_a_leaf(
    workers, mode, is_recorded, how, function, given
):
    x = torch.ones(2, requires_grad=True)

    def program():
        block = dist_autograd.context() if is_recorded else contextlib.nullcontext()
        with block, mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            y = CALLS[how](function, *[x] * given)
        return y.requires_grad, y.is_leaf, y.is_inference()

    assert workers[0].run(program) == (True, True, False)


def test_no_gradient_passes_through_a_call_made_without_recording(workers):
    x = torch.ones(2, requires_grad=True)

    def program():
        with dist_autograd.context() as context_id:
            with torch.no_grad():
                y = rpc.rpc_sync("w1", times_own, args=(x,))
            z = rpc.rpc_sync("w1", times_own, args=(x,))
            dist_autograd.backward(context_id, [(y * 5 + z * 3).sum()])
            mine = dist_autograd.get_gradients(context_id)
            theirs = workers[1].run(dist_autograd.get_gradients, context_id)
        return mine[x].tolist(), mine[y].tolist(), theirs[W].tolist()

    assert workers[0].run(program) == ([3.0, 3.0], [5.0, 5.0], [3.0, 3.0])
