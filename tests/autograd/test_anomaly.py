"""Anomaly mode that a peer asks for: on as long as somebody needs it, then as it was."""

from __future__ import annotations

import sys

import pytest
import torch

import gradwire
from gradwire.autograd.modes import CHECKS_NAN, OFF, ON, current_anomaly, detecting, under
from gradwire.testing import cluster

HERE = sys.modules[__name__]


@pytest.fixture(autouse=True)
def off_again():
    yield
    assert not torch.is_anomaly_enabled()
    torch.set_anomaly_enabled(False, True)


def test_it_is_on_in_the_block_and_then_as_it_was():
    for mode in (OFF, ON, CHECKS_NAN):
        with under(mode):
            assert current_anomaly() == mode
        assert current_anomaly() == OFF


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_overlap_leave_in_any_order(first):
    blocks = [under(ON), under(CHECKS_NAN)]
    for block in blocks:
        block.__enter__()
    assert current_anomaly() == CHECKS_NAN

    blocks[first].__exit__(None, None, None)
    assert current_anomaly() == [CHECKS_NAN, ON][first]

    blocks[1 - first].__exit__(None, None, None)
    assert current_anomaly() == OFF


def test_what_the_program_itself_has_set_stays():
    with torch.autograd.set_detect_anomaly(True):
        with under(ON):
            assert current_anomaly() == CHECKS_NAN
        assert current_anomaly() == CHECKS_NAN


def test_what_the_program_has_switched_off_meanwhile_stays_off():
    own = torch.autograd.set_detect_anomaly(True)
    with under(CHECKS_NAN):
        own.__exit__(None, None, None)

    assert current_anomaly() == OFF


def test_an_operator_whose_forward_was_not_watched_is_named_without_a_line():
    x = torch.zeros(1, requires_grad=True)
    y = torch.sqrt(x) * 0
    with (
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan") as found,
        detecting(CHECKS_NAN, [y.grad_fn], "w1"),
    ):
        y.backward()

    (note,) = found.value.__notes__
    assert note.startswith("Error detected in SqrtBackward0 on w1. Traceback of forward call")
    assert "(no information: anomaly mode was off in the forward)" in note


def test_a_run_that_ends_well_is_as_without():
    x = torch.ones(1, requires_grad=True)
    y = torch.sqrt(x) * 3
    with detecting(CHECKS_NAN, [y.grad_fn], "w1"):
        y.backward()

    assert x.grad == 1.5


def modes():
    return current_anomaly(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_it_travels_with_a_call_beside_the_other_modes(grad, inference):
    with (
        cluster(2, expose=[HERE]) as workers,
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        torch.inference_mode(inference),
        torch.set_grad_enabled(grad),
    ):
        here = modes()
        assert workers[0].run(gradwire.rpc_sync, "w1", modes) == here
    assert here == (ON, grad, inference)
