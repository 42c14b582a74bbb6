"""Plain gradient descent, taken out of place, is torch's: every bit of it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import optim

from gradwire.optim.step import Stepper
from tests.optim.test_batching import bits, values

BOTH = [False, True]


def parameters_of(first):
    return [torch.nn.Parameter(value.clone()) for value in first]


def descended(optimizer, parameters, gradients):
    with torch.no_grad():
        stepper = Stepper(optimizer, dict(zip(parameters, parameters, strict=True)))
        is_exact = stepper._is_exact(gradients)
        return stepper._maybe_descended(parameters, gradients) if is_exact else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_bit_is_the_same_and_nothing_is_written(dtype):
    torch.manual_seed(11)
    for decay, maximize, rate in itertools.product([0, 0.1, 1], BOTH, [0.01, 1]):
        first, gradients = values(dtype), values(dtype)
        theirs, ours = parameters_of(first), parameters_of(first)
        optimizer = optim.SGD(theirs, lr=rate, weight_decay=decay, maximize=maximize)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()

        stepped = descended(
            optim.SGD(ours, lr=rate, weight_decay=decay, maximize=maximize), ours, gradients
        )

        assert [*map(bits, stepped)] == [*map(bits, theirs)], (decay, maximize, rate)
        assert [value.stride() for value in stepped] == [value.stride() for value in theirs]
        assert [*map(bits, ours)] == [*map(bits, first)]


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def with_own_step(optimizer):
    optimizer.step = lambda: None
    return optimizer


def with_two_groups(optimizer):
    optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    return optimizer


class Halving(optim.SGD):
    """Has a mind of its own."""


TORCH_STEPS = {
    "momentum": lambda p: optim.SGD(p, lr=1, momentum=0.9),
    "differentiable": lambda p: optim.SGD(p, lr=1, differentiable=True),
    "fused": lambda p: optim.SGD(p, lr=1, fused=True),
    "lists asked for": lambda p: optim.SGD(p, lr=1, foreach=True),
    "a hook": lambda p: hooked(optim.SGD(p, lr=1)),
    "a step of its own": lambda p: with_own_step(optim.SGD(p, lr=1)),
    "two groups": lambda p: with_two_groups(optim.SGD(p, lr=1)),
    "a class below": lambda p: Halving(p, lr=1),
    "another class": lambda p: optim.Adam(p, lr=1),
}


@pytest.mark.parametrize("make", TORCH_STEPS.values(), ids=TORCH_STEPS)
def test_what_is_more_than_descent_is_left_to_torch(make):
    parameters = parameters_of([torch.ones(3)])

    assert descended(make(parameters), parameters, [torch.ones(3)]) is None
    assert descended(optim.SGD(parameters, lr=1), parameters, [torch.ones(3)]) is not None


class Own(torch.Tensor):
    """May compute what it likes."""


STRANGE = {
    "half precision": (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "a class of its own": (torch.ones(3).as_subclass(Own), torch.ones(3)),
    "a sparse gradient": (torch.ones(3), torch.ones(3).to_sparse()),
    "a gradient with a class of its own": (torch.ones(3), torch.nn.Parameter(torch.ones(3))),
    "a gradient of another shape": (torch.ones(3), torch.ones(1, 3)),
}


@pytest.mark.parametrize(("value", "gradient"), STRANGE.values(), ids=STRANGE)
def test_tensors_out_of_the_ordinary_are_left_to_torch(value, gradient):
    parameters = parameters_of([value])

    assert descended(optim.SGD(parameters, lr=1), parameters, [gradient]) is None


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"maximize": True}], ids=str)
def test_what_would_need_room_for_large_gradients_once_more_is_left_to_torch(options):
    parameters = parameters_of([torch.ones(1 << 19)])
    gradients = [torch.ones(1 << 19)]

    assert descended(optim.SGD(parameters, lr=1, **options), parameters, gradients) is None
    assert descended(optim.SGD(parameters, lr=1), parameters, gradients) is not None


@pytest.mark.parametrize("is_plain", BOTH)
def test_options_that_are_not_plain_are_left_to_torch(is_plain):
    """A rate may be a tensor."""
    pairs = [(p, torch.nn.Parameter(p.data)) for p in parameters_of([torch.ones(3)])]
    optimizer = optim.SGD([s for _, s in pairs], lr=0.5 if is_plain else torch.tensor(0.5))
    stepper, descended = Stepper(optimizer, dict(pairs)), []
    stepper._maybe_descended = lambda *_: descended.append("here")

    stepper.step(pairs, [torch.ones(3)], is_plain=is_plain)

    assert descended == ["here"] * is_plain
    assert [s.tolist() for _, s in pairs] == [[0.5] * 3]
