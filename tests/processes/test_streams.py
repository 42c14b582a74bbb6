"""Streams, functions that await, actors and names, in other processes."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire import PeerLost
from tests.leftovers import eventually
from tests.processes import far


def test_items_come_in_order_over_every_link(linked):
    assert list(gradwire.stream("w1", far.numbers, args=(1000,), ahead=64)) == list(range(1000))


def test_backward_goes_through_the_items(workers):
    x = torch.tensor([2.0, 3.0], requires_grad=True)

    sum(y.sum() for y in gradwire.stream("w1", far.powers, args=(x, 3))).backward()

    torch.testing.assert_close(x.grad, 1 + 2 * x.detach() + 3 * x.detach() ** 2)


def test_large_items_come_unchanged(workers):
    x = torch.full((1 << 18,), 2.0)

    for n, y in enumerate(gradwire.stream("w2", far.powers, args=(x, 6)), 1):
        assert torch.equal(y, torch.full_like(x, 2.0**n))


def test_a_generator_ends_when_its_reader_leaves(workers):
    for y in gradwire.stream("w1", far.powers, args=(torch.ones(2), 10_000)):
        assert torch.equal(y, torch.ones(2))
        break

    assert eventually(lambda: gradwire.rpc_sync("w1", far.powers_have_ended))


def test_the_death_of_the_worker_is_raised_at_the_next_item(workers):
    items = iter(gradwire.stream("w1", far.numbers, args=(1000,)))
    assert [next(items), next(items)] == [0, 1]

    workers["w1"].kill()

    with pytest.raises(PeerLost, match="w1"):
        list(items)


def test_functions_that_await_run_side_by_side_and_are_differentiable(workers):
    x = torch.rand(3, requires_grad=True)
    calls = [gradwire.rpc_async("w1", far.awaited, args=(x, "w2")) for _ in range(50)]

    sum(call.wait().sum() for call in calls).backward()

    torch.testing.assert_close(x.grad, 100 * x.detach().cos())


def test_an_actor_that_every_process_finds_is_differentiable_and_in_order(linked):
    x = torch.tensor(3.0, requires_grad=True)
    weight = gradwire.actor("w1", far.Weight, args=(2.0,), name="weight")

    here = sum(future.wait() for future in [weight.scale(x, n) for n in range(20)])
    there = gradwire.rpc_sync("w2", far.scale_by_name, args=(x, 20))
    (here + there).backward()

    calls, gradient = weight.rpc_sync().seen()
    assert calls == list(range(21))
    assert gradient == 21 * 3
    assert x.grad == 21 * 2
