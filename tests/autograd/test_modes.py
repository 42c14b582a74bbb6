"""A function that a peer calls under autocast runs under autocast, and so does a backward."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import gradwire
from gradwire.autograd.modes import CHECKS_NAN, OFF, Modes, current_modes, in_modes
from gradwire.errors import BadMessage
from gradwire.testing import cluster
from gradwire.wire.tensor import DTYPE_CODES

HERE = sys.modules[__name__]
BF16, F16 = DTYPE_CODES[torch.bfloat16], DTYPE_CODES[torch.float16]


def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


LAYERS = module()


def forward(x):
    return LAYERS(x)


def relayed(x):
    return gradwire.rpc_sync("w2", forward, args=(x,))


class Squared(torch.autograd.Function):
    """Its backward is an operator that autocast changes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.float() @ x.float().T

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient + gradient.T).float() @ x.float()


def squared(x):
    return Squared.apply(x)


def is_on():
    return torch.is_autocast_enabled("cpu")


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made
    LAYERS.zero_grad()


def test_the_modes_of_this_thread_are_entered_elsewhere():
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        modes = current_modes()
        assert current_modes(autocast=False).autocast == {}
        with torch.autocast("cpu", enabled=False), torch.autograd.set_detect_anomaly(True):
            assert current_modes() == Modes(CHECKS_NAN, {}, False)
    assert modes == Modes(OFF, {"cpu": F16}, False)

    with in_modes(modes):
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert current_modes() == modes
    assert current_modes() == Modes()


@pytest.mark.parametrize("dtypes", [{"cpu": DTYPE_CODES[torch.int8]}, {"cpu": 999}, {"tpu": BF16}])
def test_what_is_no_mode_is_refused(dtypes):
    with pytest.raises(BadMessage, match="cannot be autocast"), in_modes(Modes(OFF, dtypes)):
        pass
    assert current_modes() == Modes()


def test_the_mode_of_devices_that_this_worker_lacks_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with in_modes(Modes(OFF, {"cuda": F16, "cpu": BF16})):
        assert not torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [forward, relayed])
def test_values_and_gradients_are_those_of_one_process(workers, function, dtype):
    x, alone = torch.randn(4, 8), module()
    with torch.autocast("cpu", dtype=dtype):
        expected = alone(x)
        y = workers[0].run(gradwire.rpc_sync, "w1", function, args=(x,))
    expected.float().square().sum().backward()
    workers[0].run(lambda: y.float().square().sum().backward())

    assert y.dtype is dtype
    assert torch.equal(y, expected)
    for mine, theirs in zip(LAYERS.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("inside", [True, False])
def test_a_backward_runs_under_it_as_in_one_process(workers, inside):
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        (expected,) = torch.autograd.grad(squared(x).sum(), x)

    def program():
        y = gradwire.rpc_sync("w1", squared, args=(x,)).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return torch.autograd.grad(y, x)[0]

    assert torch.equal(workers[0].run(program), expected)


def test_a_thread_that_has_served_such_a_call_is_as_it_was(workers):
    for _ in range(20):  # soon on the thread that reads
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert workers[0].run(gradwire.rpc_sync, "w1", is_on)
        assert not workers[0].run(gradwire.rpc_sync, "w1", is_on)
