"""What is stepped at once is stepped as one after the other: every bit of it."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import torch
from torch import optim

import gradwire
from gradwire.optim import step
from gradwire.optim.step import Stepper
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left
from tests.optim import far

BOTH = [False, True]
DECAY = [0, 0.1]
OPTIONS = {
    optim.SGD: {
        "momentum": [0, 0.9],
        "dampening": [0, 0.3],
        "weight_decay": DECAY,
        "maximize": BOTH,
    },
    optim.Adam: {"weight_decay": DECAY, "amsgrad": BOTH, "maximize": BOTH},
    optim.AdamW: {"weight_decay": DECAY, "amsgrad": BOTH, "maximize": BOTH},
    optim.Adamax: {"weight_decay": DECAY, "maximize": BOTH},
    optim.Adagrad: {"weight_decay": DECAY, "lr_decay": [0, 0.1], "maximize": BOTH},
    optim.Adadelta: {"weight_decay": DECAY, "maximize": BOTH},
    optim.RMSprop: {
        "weight_decay": DECAY,
        "momentum": [0, 0.9],
        "centered": BOTH,
        "maximize": BOTH,
    },
}
SHAPES = [(), (1,), (3,), (0,), (64,), (7, 5), (33, 17), (1025,), (2, 3, 4, 5)]


def values(dtype):
    """Of all sizes; also one that is not contiguous, and what is not a number."""
    made = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    strange = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40, -1e30], dtype=dtype)
    return [*made, torch.randn(6, 4, dtype=dtype).t(), strange]


def bits(tensor):
    kind = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(kind).tolist()


def stepped(cls, options, first, gradients, at_once):
    parameters = [torch.nn.Parameter(value.clone()) for value in first]
    pairs = [(p, torch.nn.Parameter(p.data)) for p in parameters]
    optimizer = cls([stand_in for _, stand_in in pairs], lr=0.01, **options)
    stepper = Stepper(optimizer, dict(pairs))
    for several in gradients:
        assert stepper._is_batch
        assert stepper._is_exact(several)
        with torch.no_grad():
            stepper.step(pairs, several, is_plain=at_once)
        for parameter, stand_in in pairs:
            parameter.data = stand_in.data
    state = [value for _, s in pairs for value in optimizer.state[s].values()]
    return [bits(tensor) for tensor in [*parameters, *state] if tensor is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_every_bit_is_the_same(cls, dtype):
    torch.manual_seed(7)
    for chosen in itertools.product(*OPTIONS[cls].values()):
        options = dict(zip(OPTIONS[cls], chosen, strict=True))
        first, gradients = values(dtype), [values(dtype) for _ in range(4)]
        before = [[bits(gradient) for gradient in several] for several in gradients]

        at_once = stepped(cls, options, first, gradients, True)

        assert at_once == stepped(cls, options, first, gradients, False), options
        assert before == [[bits(gradient) for gradient in several] for several in gradients]


def test_all_that_are_stepped_at_once_are_compared():
    assert set(OPTIONS) == {*step._EXACT}


def is_batched(cls=optim.SGD, n=8, dtype=torch.float32, size=4, gradient=None, **options):
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for _ in range(n)]
    optimizer = cls(parameters, lr=0.01, **options)
    gradients = [torch.ones(size, dtype=dtype) for _ in range(n)]
    if gradient is not None:
        gradients[-1] = gradient
    asked, seen = optimizer.param_groups[0]["foreach"], []
    optimizer.step = lambda: seen.append(optimizer.param_groups[0]["foreach"])
    pairs = [(parameter, torch.nn.Parameter(parameter.data)) for parameter in parameters]
    with suppress(RuntimeError):  # torch refuses to assign such a gradient
        Stepper(optimizer, dict(pairs)).step(pairs, gradients, is_plain=True)
    assert optimizer.param_groups[0]["foreach"] is asked
    return seen == [True] and asked is None


class Own(optim.SGD):
    """It may do anything."""


@pytest.mark.parametrize(
    "why",
    [
        {"n": 5},
        {"size": 1 << 16},
        {"dtype": torch.float16},
        {"dtype": torch.complex64},
        {"cls": optim.RAdam},
        {"cls": Own},
        {"foreach": False},
        {"foreach": True},
        {"fused": True},
        {"differentiable": True},
        {"momentum": 0.9, "nesterov": True},
        {"gradient": torch.ones(4).to_sparse()},
        {"gradient": torch.ones(4, dtype=torch.float64)},
        {"gradient": torch.nn.Parameter(torch.ones(4))},
    ],
    ids=str,
)
def test_what_may_differ_is_stepped_as_ever(why):
    assert is_batched()
    assert not is_batched(**why)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_optimizer_is_told_what_its_user_has_said(lr):
    with cluster(2, expose=[far]) as workers:
        workers[0].run(tell, lr)
        assert_nothing_left(workers)


def tell(lr):
    made = [gradwire.remote("w1", far.Part, args=(n,)) for n in range(3)]
    refs = [ref for part in made for ref in part.rpc_sync().refs()]
    optimizer = gradwire.DistributedOptimizer(optim.Adam, refs, lr=lr)
    local = [p for n in range(3) for p in far.Part(n).parameters()]
    truth = optim.Adam(local, lr=lr)
    for part in made:
        part.rpc_sync().slope()
    for parameter in local:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
        truth.step()

    found = [value for part in made for value in part.rpc_sync().values()]
    assert all(torch.equal(a, b) for a, b in zip(found, local, strict=True))
    (shard,) = optimizer._shards.values()
    assert shard.rpc_sync().options()[0]["foreach"] is None
