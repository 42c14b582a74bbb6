"""What hooks leave to the end of an engine run sees and changes the gradients of that run."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.autograd import Variable

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left

HERE = sys.modules[__name__]


class Layer(torch.nn.Module):
    """y = w x; when a backward is through, it doubles the gradient of w, or fails."""

    def __init__(self, *, fails=False):
        super().__init__()
        self.fails = fails
        self.weight = torch.nn.Parameter(torch.tensor(3.0))
        self.weight.register_hook(self.later)

    def later(self, _):
        Variable._execution_engine.queue_callback(self.at_the_end)

    def at_the_end(self):
        self.weight.grad *= 2
        if self.fails:
            raise ValueError("not at the end")

    def forward(self, x):
        return self.weight * x

    def gradients(self, context):
        return self.weight.grad, gw.get_gradients(context).get(self.weight)


@pytest.fixture
def workers():
    with cluster(2, expose=[HERE]) as made:
        with made[0].worker.scope():
            yield made
        assert_nothing_left(made)


@pytest.mark.parametrize("place", ["w0", "w1"])
def test_a_callback_changes_the_map_and_not_grad(workers, place):
    layer = gw.remote(place, Layer)

    with gw.context() as context:
        for times in (1, 3):  # the second backward adds 5 to what is doubled already
            gw.backward(context, [layer.rpc_sync().forward(torch.tensor(5.0))])
            assert layer.rpc_sync().gradients(context) == (None, 10 * times)


def test_a_callback_changes_grad_and_not_the_map(workers):
    layer = gw.remote("w1", Layer)

    with gw.context() as context:
        layer.rpc_sync().forward(torch.tensor(5.0)).backward()
        assert layer.rpc_sync().gradients(context) == (10, None)


@pytest.mark.parametrize("into_map", [True, False], ids=["map", "grad"])
def test_what_a_failing_callback_has_changed_is_put_back(workers, into_map):
    layer = gw.remote("w1", Layer, kwargs={"fails": True})

    with gw.context() as context:
        loss = layer.rpc_sync().forward(torch.tensor(5.0))
        differentiate = (lambda: gw.backward(context, [loss])) if into_map else loss.backward
        with pytest.raises(ValueError, match="not at the end"):
            differentiate()
        assert layer.rpc_sync().gradients(context) == (None, None)
