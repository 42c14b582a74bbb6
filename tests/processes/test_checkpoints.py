"""Checkpoints around calls whose callees draw random numbers, each from a generator of its own.

The truth is this process, in which each worker's part runs under that worker's seed.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.processes import far

WORKERS = ["w0", "w1", "w2"]
KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Apart:
    """What the generator of each worker would be, in one process."""

    def __init__(self):
        self._states = {}
        for number, name in enumerate(WORKERS):
            torch.manual_seed(number + 5)
            self._states[name] = torch.get_rng_state()
        self._here = None

    @contextmanager
    def on(self, name):
        before, self._here = self._here, name
        if before is not None:
            self._states[before] = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        yield
        self._states[name] = torch.get_rng_state()
        self._here = before
        if before is not None:
            torch.set_rng_state(self._states[before])

    def sync(self, to, function, *args):
        with self.on(to):
            return function(*args)


def noisy_there(apart, x, to):
    return far.noisy(apart.sync(to, far.noisy, far.noisy(x)))


def noisy_twice(apart, x, to):
    return far.noisy(apart.sync(to, far.noisy, x) * apart.sync(to, far.noisy, x.cos()))


def raised(apart, x, to):
    return noisy_there(apart, x.detach(), to).sum().item()


def far_after_an_error(x):
    try:
        gradwire.rpc_sync("w1", far.raises_what_it_drew, args=(x, "w2"))
    except ValueError as error:
        return x * error.args[0]


# each with real workers, and in one process
PROGRAMS = {
    "a call": (
        lambda x: gradwire.rpc_sync("w1", far.noisy, args=(x,)),
        lambda apart, x: apart.sync("w1", far.noisy, x),
    ),
    "a future": (
        lambda x: gradwire.rpc_async("w1", far.noisy, args=(x,)).wait(),
        lambda apart, x: apart.sync("w1", far.noisy, x),
    ),
    "a reference": (
        lambda x: gradwire.remote("w1", far.noisy, args=(x,)).to_here(),
        lambda apart, x: apart.sync("w1", far.noisy, x),
    ),
    "nested": (
        lambda x: gradwire.rpc_sync("w1", far.noisy_there, args=(x, "w2")),
        lambda apart, x: apart.sync("w1", noisy_there, apart, x, "w2"),
    ),
    "nested, back here": (
        lambda x: far.noisy(gradwire.rpc_sync("w1", far.noisy_there, args=(far.noisy(x), "w0"))),
        lambda apart, x: far.noisy(apart.sync("w1", noisy_there, apart, far.noisy(x), "w0")),
    ),
    "a reference of its own": (
        lambda x: gradwire.rpc_sync("w1", far.noisy_kept, args=(x, "w1")),
        lambda apart, x: apart.sync("w1", noisy_there, apart, x, "w1"),
    ),
    "a reference, back here": (
        lambda x: far.noisy(gradwire.remote("w1", far.noisy_there, args=(x, "w0")).to_here()),
        lambda apart, x: far.noisy(apart.sync("w1", noisy_there, apart, x, "w0")),
    ),
    "an error that tells what was drawn": (
        far_after_an_error,
        lambda apart, x: x * apart.sync("w1", raised, apart, x, "w2"),
    ),
    "a checkpoint within": (
        lambda x: checkpoint(far.noisy_there, x, "w1", use_reentrant=False).tan(),
        lambda apart, x: noisy_there(apart, x, "w1").tan(),
    ),
}


def stepped(program, reentrant=None):
    x = torch.linspace(0.1, 2.0, 40, dtype=torch.float64, requires_grad=True)

    def after(x):
        return program(x).cos().exp()

    inside = x * 1
    y = after(inside) if reentrant is None else checkpoint(after, inside, use_reentrant=reentrant)
    (y * y).sum().backward()
    return x.grad


def far_gradient(program, reentrant):
    for number, name in enumerate(WORKERS):
        gradwire.rpc_sync(name, far.seed, args=(number + 5,))
    with gradwire.context():
        found = stepped(program, reentrant)
    return found, [gradwire.rpc_sync(name, far.drawn) for name in WORKERS]


def local_gradient(program):
    apart = Apart()
    with apart.on("w0"):
        found = stepped(lambda x: program(apart, x))
    return found, [apart.sync(name, far.drawn) for name in WORKERS]


@KINDS
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_is_that_of_the_numbers_drawn(workers, name, reentrant):
    far_program, program = PROGRAMS[name]

    found, next_drawn = far_gradient(far_program, reentrant)
    expected, next_expected = local_gradient(program)

    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(next_drawn, next_expected, strict=True))


@KINDS
def test_two_futures_to_one_worker(workers, reentrant):
    def program(x):
        return gradwire.rpc_sync("w1", far.noisy_twice, args=(x, "w2"))

    found, _ = far_gradient(program, reentrant)
    either = [local_gradient(lambda apart, x: apart.sync("w1", noisy_twice, apart, x, "w2"))[0]]
    either.append(local_gradient(lambda apart, x: apart.sync("w1", _other, apart, x, "w2"))[0])

    assert any(torch.equal(found, expected) for expected in either)


def _other(apart, x, to):
    """The second of two calls that are made at once may run first."""
    second = apart.sync(to, far.noisy, x.cos())
    return far.noisy(apart.sync(to, far.noisy, x) * second)


@KINDS
def test_a_module_elsewhere(workers, reentrant):
    module = gradwire.RemoteModule("w1", far.Noisy)
    local = far.Noisy()

    found, next_drawn = far_gradient(module, reentrant)
    expected, next_expected = local_gradient(lambda apart, x: apart.sync("w1", local, x))
    weight = gradwire.rpc_sync("w1", far.gradients_of, args=(module.get_module_rref(), None))

    assert torch.equal(found, expected)
    assert torch.equal(weight[0], local.weight.grad)
    assert all(torch.equal(a, b) for a, b in zip(next_drawn, next_expected, strict=True))
