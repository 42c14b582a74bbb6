"""Checkpoints of an optimizer: values and state, brought back to the same parameters or others."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire import UsageError
from gradwire.testing import cluster
from tests.rpc import far_incarnations as far


@pytest.fixture
def workers():
    with cluster(3, expose=[far]) as workers, workers[0].worker.scope():
        yield workers


def _made(places=("w1", "w2", "w1")):
    refs = [gradwire.remote(place, far.weight) for place in places]
    return refs, gradwire.DistributedOptimizer(torch.optim.Adam, refs, lr=0.1)


def _step(refs, optimizer):
    with gradwire.context() as context:
        x = torch.tensor(2.0, dtype=torch.float64)
        for ref in refs:
            x = gradwire.rpc_sync(ref.owner(), far.product, args=(ref, x))
        gradwire.backward(context, [x])
        optimizer.step(context)


def test_steps_after_a_restore_are_the_same(workers):
    refs, optimizer = _made()
    _step(refs, optimizer)
    saved = optimizer.checkpoint()
    _step(refs, optimizer)
    then = optimizer.checkpoint()
    assert then["parameters"] != saved["parameters"]

    optimizer.restore(saved)
    assert optimizer.checkpoint()["parameters"] == saved["parameters"]
    _step(refs, optimizer)
    assert optimizer.checkpoint() == then

    elsewhere, other = _made(("w2", "w0", "w0"))
    other.restore(saved)
    _step(elsewhere, other)
    assert other.checkpoint()["parameters"] == then["parameters"]


def test_what_does_not_fit_is_refused(workers):
    _, optimizer = _made()
    _, other = _made(("w1",))

    with pytest.raises(UsageError, match="not a checkpoint: it has no values of parameters"):
        optimizer.restore(optimizer.state_dict())
    with pytest.raises(ValueError, match="the checkpoint has 1 parameters, this optimizer 3"):
        optimizer.restore(other.checkpoint())
