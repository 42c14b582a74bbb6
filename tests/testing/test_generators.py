"""Random numbers of its own for each worker of an in-process cluster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import gradwire
from gradwire.errors import UsageError
from gradwire.testing import cluster, drawing_from, generators

DRAWS = {
    "dropout": lambda: F.dropout(torch.ones(50)),
    "dropout in place": lambda: F.dropout(torch.ones(50), inplace=True),
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(50), training=True),
    "rand": lambda: torch.rand(50),
    "randn": lambda: torch.randn(50),
    "rand_like": lambda: torch.rand_like(torch.ones(50)),
    "randint": lambda: torch.randint(0, 1000, (50,)),
    "randperm": lambda: torch.randperm(50),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.5)),
    "normal": lambda: torch.normal(torch.ones(50), 1.0),
    "rrelu": lambda: F.rrelu(-torch.ones(50), training=True),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "init": lambda: torch.nn.Linear(5, 5).weight.detach(),
}


def dropped(n):
    return F.dropout(torch.ones(n))


def drawn_by_both(n):
    return dropped(n), gradwire.rpc_sync("w0", dropped, args=(n,)), dropped(n)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_operators_draw_from_the_generator_of_the_block(draw):
    before = torch.get_rng_state()
    with drawing_from(generators(1, seed=3)[0]):
        first, second = draw(), draw()
    with drawing_from(generators(1, seed=3)[0]):
        again = draw()

    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_they_do_so_in_inference_mode_too(draw):
    """Which shows operators that otherwise call others before a mode sees them."""
    with drawing_from(torch.Generator().manual_seed(3)):
        plain = draw()
    before = torch.get_rng_state()
    with drawing_from(torch.Generator().manual_seed(3)), torch.inference_mode():
        inferred = draw()

    assert torch.equal(inferred, plain)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_numbers_are_those_of_the_generator():
    with drawing_from(generators(2, seed=3)[1]):
        drawn = torch.rand(5)

    assert torch.equal(drawn, torch.rand(5, generator=generators(2, seed=3)[1]))


def test_a_generator_that_was_asked_for_is_used():
    mine = torch.Generator().manual_seed(1)
    with drawing_from(torch.Generator().manual_seed(2)):
        drawn = torch.rand(5, generator=mine), torch.ones(9).bernoulli_(0.5, generator=mine)

    mine.manual_seed(1)
    expected = torch.rand(5, generator=mine), torch.ones(9).bernoulli_(0.5, generator=mine)
    assert torch.equal(drawn[0], expected[0])
    assert torch.equal(drawn[1], expected[1])


def test_an_operator_that_takes_no_generator_is_refused():
    with (
        drawing_from(torch.Generator()),
        pytest.raises(UsageError, match=r"native_dropout.* takes no other\n.*use processes"),
    ):
        torch.native_dropout(torch.ones(5), 0.5, True)


def test_each_worker_draws_from_its_own():
    with cluster(2, expose=[dropped, drawn_by_both], generators=generators(2, seed=7)) as workers:
        here, nested, after = workers[0].run(gradwire.rpc_sync, "w1", drawn_by_both, args=(40,))
        own = workers[0].run(dropped, 40)

    one = generators(2, seed=7)
    with drawing_from(one[1]):
        assert torch.equal(here, dropped(40))
    with drawing_from(one[0]):
        assert torch.equal(nested, dropped(40))
    with drawing_from(one[1]):
        assert torch.equal(after, dropped(40))
    with drawing_from(one[0]):
        assert torch.equal(own, dropped(40))


def test_every_worker_needs_one():
    with (
        pytest.raises(UsageError, match="3 workers were given 2 generators"),
        cluster(3, generators=generators(2, seed=1)),
    ):
        pass
