"""Anomaly mode on the worker that runs a backward covers what its loss has run on others."""

from __future__ import annotations

import pytest
import torch

import gradwire
from tests.processes import far

pytestmark = pytest.mark.filterwarnings("ignore:.*Error detected in")


def _loss(x, *through):
    for worker in through:
        x = gradwire.rpc_sync(worker, far.rooted, args=(x,))
    return (x * 0).sum()


@pytest.mark.parametrize("through", [["w1"], ["w2", "w1"]], ids=["one", "two"])
@pytest.mark.parametrize("into_the_map", [False, True], ids=["grad", "map"])
def test_the_operator_that_made_a_nan_is_named_with_its_line_on_its_worker(
    workers, through, into_the_map
):
    x = torch.zeros(2, requires_grad=True)
    with gradwire.context() as context, torch.autograd.set_detect_anomaly(True):
        loss = _loss(x, *through)
        with pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan") as found:
            gradwire.backward(context, [loss]) if into_the_map else loss.backward()

    said = str(found.value)
    assert "Error detected in SqrtBackward0 on w1. Traceback of forward call" in said
    assert "return torch.sqrt(x)  # its gradient at zero is no number" in said
    assert x.grad is None


def test_what_raises_is_named_though_numbers_are_not_looked_at(workers):
    x = torch.zeros(2, requires_grad=True)
    with gradwire.context(), torch.autograd.set_detect_anomaly(True, check_nan=False):
        _loss(x, "w1").backward()
        assert x.grad.isnan().all()

        y = gradwire.rpc_sync("w1", far.spoilt, args=(x,))
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as found:
            y.sum().backward()

    assert "Error detected in ExpBackward0 on w1. Traceback of forward call" in str(found.value)
    assert "y = torch.exp(x)" in str(found.value)


def test_it_is_off_again_when_nobody_asks_for_it(workers):
    x = torch.zeros(2, requires_grad=True)
    with gradwire.context():
        with torch.autograd.set_detect_anomaly(True):
            assert gradwire.rpc_sync("w1", far.is_anomaly_enabled, args=("w2",))
        assert not gradwire.rpc_sync("w1", far.is_anomaly_enabled, args=("w2",))
        _loss(x, "w1").backward()

    assert x.grad.isnan().all()
