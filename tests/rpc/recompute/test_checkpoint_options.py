"""The options of torch's checkpoint, and its other names, around calls that draw."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gradwire
import gradwire.testing
from gradwire.autograd.scope import current_context
from gradwire.rpc.recompute.recording import Recording
from tests.rpc.recompute.test_checkpoints import gradient, nested, noisy, plain, recomputed, same


class Block(nn.Module):
    """Draws here and there."""

    def forward(self, x):
        return noisy(nested(noisy(x))).cos().exp()


def plainly(x):
    return Block()(x)


def save_products(_context, operator, *_args, **_kwargs):
    is_saved = operator in (torch.ops.aten.exp.default, torch.ops.aten.cos.default)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


OPTIONS = {
    "determinism_check": {"determinism_check": "none"},
    "debug": {"debug": True},
    "early_stop": {"early_stop": False},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, save_products)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_checkpoint_does_not_change_the_numbers(name):
    found = gradient(lambda x: checkpoint(plainly, x, use_reentrant=False, **OPTIONS[name]))

    same(found, gradient(plainly))


@pytest.mark.parametrize("kind", [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT])
def test_a_wrapped_module_is_exact(kind):
    wrapped = checkpoint_wrapper(Block(), checkpoint_impl=kind)

    same(gradient(wrapped), gradient(plainly))


def test_a_composable_checkpoint_is_exact():
    module = Block()
    composable_checkpoint(module)

    same(gradient(module), gradient(plainly))


def test_a_module_that_calls_a_compiled_function_is_exact():
    compiled = torch.compile(torch.tanh, backend="eager")

    def run(x):
        return compiled(nested(compiled(noisy(x))))

    found = gradient(lambda x: recomputed(run, x, False))

    same(found, plain(run))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_without_a_graph_draws_once(mode, reentrant):
    def evaluated(x, run):
        with mode():
            value = run(x.detach())
        return x * value.clone() if mode is torch.no_grad else x * value.sum().item()

    def inside(x):
        return evaluated(x, lambda x: recomputed(nested, x, reentrant))

    def outside(x):
        return evaluated(x, lambda x: nested(x).cos().exp())

    # An operator that is given a generator, as in a cluster, cannot run in inference mode.
    own = mode is torch.no_grad
    same(gradient(inside, own=own), gradient(outside, own=own))


def recordings():
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Recording]


def test_a_graph_that_is_dropped_takes_its_recordings_along():
    """What a checkpoint keeps to repeat its calls is part of its graph, also on the callee."""
    found, before = [], len(recordings())

    def run(x):
        graphs = [recomputed(nested, x, reentrant) for reentrant in (True, False)]
        gradwire.rpc_async("w2", noisy, args=(x.detach(),)).wait()
        found.append(len(recordings()))
        graphs.clear()
        found.append(len(recordings()))
        return x

    gradient(run)

    assert [count - before for count in found] == [2, 0]


def test_a_checkpoint_that_raised_leaves_the_context_of_later_code():
    """torch drops the generator of such a checkpoint when the exception is collected."""

    def fail(x):
        raise ZeroDivisionError

    def program():
        x = torch.ones(2, requires_grad=True)
        with gradwire.context(), pytest.raises(ZeroDivisionError) as raised:
            checkpoint(fail, x, use_reentrant=False)
        with gradwire.context() as context:
            del raised
            gc.collect()
            assert current_context() == context
        assert current_context() is None

    with gradwire.testing.cluster(1) as workers:
        workers[0].run(program)
