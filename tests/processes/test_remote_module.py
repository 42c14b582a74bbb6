"""Modules on real processes; the truth is the same module in this one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwire
from tests.processes import far


@pytest.fixture(autouse=True)
def as_many_threads_as_there():
    """The sums of a norm depend on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _alike(worker):
    """A layer here, and one with the same weights there."""
    local = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4)).double()
    there = [
        gradwire.RemoteModule(worker, nn.Linear, (3, 4), {"dtype": torch.float64}),
        gradwire.RemoteModule(worker, nn.Tanh),
        gradwire.RemoteModule(worker, nn.BatchNorm1d, (4,), {"dtype": torch.float64}),
    ]
    far_one = nn.Sequential(*there)
    far_one.load_state_dict(local.state_dict())
    return local, far_one


def _gradients_of(modules, context=None):
    found = [
        gradwire.rpc_sync(m.on, far.gradients_of, args=(m.get_module_rref(), context))
        for m in modules
    ]
    return [gradient for gradients in found for gradient in gradients]


def test_a_module_elsewhere_computes_what_one_here_does(linked):
    torch.manual_seed(1)
    local, far_one = _alike("w1")
    x = torch.randn(6, 3, dtype=torch.float64)
    mine, yours = x.clone().requires_grad_(), x.clone().requires_grad_()

    with gradwire.context():
        loss = far_one(yours).exp().sum()
        loss.backward()
    expected = local(mine).exp().sum()
    expected.backward()

    assert torch.equal(loss, expected)
    assert torch.equal(yours.grad, mine.grad)
    wanted = [p.grad for p in local.parameters()]
    found = _gradients_of(far_one)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    state = far_one.state_dict()  # with the running statistics of the norm
    assert list(state) == list(local.state_dict())
    assert all(torch.equal(state[key], value) for key, value in local.state_dict().items())


def test_one_context_s_gradients_are_in_its_map_there(workers):
    local, far_one = _alike("w2")
    x = torch.ones(2, 3, dtype=torch.float64)

    with gradwire.context() as context:
        gradwire.backward(context, [far_one.eval()(x).sum()])
        found = _gradients_of(far_one, context)
    local.eval()(x).sum().backward()

    assert all(torch.equal(a, p.grad) for a, p in zip(found, local.parameters(), strict=True))
    assert _gradients_of(far_one) == [None] * 4


def test_a_third_worker_uses_it(workers):
    module = gradwire.RemoteModule("w1", far.Layer, (3.0,))
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)

    with gradwire.context():
        where, y = gradwire.rpc_sync("w2", far.used, args=(module, x))
        y.sum().backward()

    assert where == "w2"
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert _gradients_of([module]) == [2]


def test_what_goes_wrong_there_is_raised_here(workers):
    module = gradwire.RemoteModule("w1", nn.Linear, (3, 4))

    with torch.no_grad(), pytest.raises(RuntimeError, match="on w1: mat1 and mat2"):
        module(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict({"weight": torch.ones(1), "bias": torch.ones(4)})
