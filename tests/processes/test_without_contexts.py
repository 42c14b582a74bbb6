"""Graphs over real processes that no context encloses: exact, and gone with their tensors."""

from __future__ import annotations

import gc

import pytest
import torch

import gradwire
from gradwire import PeerLost
from tests.leftovers import eventually
from tests.processes import far

NOTHING = {"sent": 0, "received": 0, "passes": 0}


def alive(name: str) -> dict[str, int]:
    found = gradwire.rpc_sync(name, far.edges_alive)
    return {what: found[what] for what in NOTHING}


def assert_all_gone() -> None:
    def are_gone() -> bool:
        gc.collect()
        return all(alive(name) == NOTHING for name in ("w0", "w1", "w2"))

    assert eventually(are_gone), {name: alive(name) for name in ("w0", "w1", "w2")}


def test_two_lines(workers):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = gradwire.rpc_sync("w1", far.doubled_along, args=(["w2", "w0", "w1"], x))
    (y * y).sum().backward()

    assert x.grad.tolist() == [2 * 16 * 16 * 1.0, 2 * 16 * 16 * 2.0]
    del y
    assert_all_gone()


def test_what_a_process_keeps_is_one_graph_over_steps_and_callers(workers):
    weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    xs = [torch.tensor(float(n), dtype=torch.float64) for n in (1, 2, 4)]
    for x in xs[:-1]:
        gradwire.rpc_sync("w1", far.grown, args=(weight, x))  # the result is dropped at once
    last = gradwire.rpc_sync("w1", far.grown, args=(weight, xs[-1]))
    last.backward(retain_graph=True)
    assert weight.grad.item() == 1 / 4 + 2 / 2 + 4

    weight.grad = None
    (2 * gradwire.rpc_sync("w1", far.grown, args=(weight, xs[0]))).backward()
    assert weight.grad.item() == 2 * ((1 / 4 + 2 / 2 + 4) / 2 + 1)

    del last
    gradwire.rpc_sync("w1", far.forget_state)
    assert_all_gone()


def test_many_steps_leave_nothing_and_remember_one_number(workers):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for _ in range(200):
        x.grad = None
        gradwire.rpc_sync("w1", far.doubled_along, args=(["w2"], x)).sum().backward()
        assert x.grad.tolist() == [4.0, 4.0]
    assert_all_gone()
    for name in ("w1", "w2"):
        assert gradwire.rpc_sync(name, far.edges_alive)["remembered"] <= 1


def test_a_graph_through_a_dead_process_says_so_and_the_rest_is_freed(workers):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = gradwire.rpc_sync("w1", far.doubled_along, args=(["w2"], x))
    z = gradwire.rpc_sync("w1", far.doubled_along, args=([], x))
    workers["w2"].kill()
    with pytest.raises(PeerLost, match="w2"):
        y.sum().backward()
    z.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    del y, z

    def are_gone() -> bool:
        gc.collect()
        return all(alive(name) == NOTHING for name in ("w0", "w1"))

    assert eventually(are_gone), {name: alive(name) for name in ("w0", "w1")}
