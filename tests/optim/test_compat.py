"""With torch's API a step has a context, and graphs outside of contexts are not known to anyone."""

from __future__ import annotations

import pytest
import torch

from gradwire.compat import autograd as dist_autograd
from gradwire.compat.optim import DistributedOptimizer
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left
from tests.optim import far


@pytest.fixture(autouse=True)
def on_w0():
    with cluster(2, behavior=TORCH) as workers:
        with workers[0].worker.scope():
            yield
        assert_nothing_left(workers)


def references(part):
    return [rpc.RRef(parameter) for parameter in part.local_value().parameters()]


def made():
    part = rpc.remote("w1", far.Part, args=(0,))
    refs = [rpc.RRef(torch.nn.Parameter(torch.ones(2))), *rpc.rpc_sync("w1", references, (part,))]
    return part, DistributedOptimizer(torch.optim.SGD, refs, lr=0.1)


def test_a_step_needs_the_id_of_a_context():
    part, optimizer = made()
    part.rpc_sync().slope()
    before = part.rpc_sync().values()

    with pytest.raises(TypeError, match=r"step\(\) missing 1 required positional argument: 'cont"):
        optimizer.step()

    after = part.rpc_sync().values()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_step_in_a_context_takes_the_gradients_of_its_map():
    part, optimizer = made()
    local, x = far.Part(0), torch.ones(1, 4, dtype=torch.float64)
    local(x).sum().backward()
    torch.optim.SGD(local.parameters(), lr=0.1).step()

    with dist_autograd.context() as context:
        dist_autograd.backward(context, [part.rpc_sync().forward(x).sum()])
        optimizer.step(context)

    found = part.rpc_sync().values()
    assert all(torch.equal(a, b) for a, b in zip(found, local.parameters(), strict=True))
