"""Large tensors between processes of one host: same values, and nothing stays behind."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import Options
from gradwire.transport.shared_memory import can_share
from tests.leftovers import eventually
from tests.process_cluster import process_cluster
from tests.processes import far

pytestmark = pytest.mark.skipif(not can_share(), reason="this system has no memfd")

LARGE = 1 << 18


def _numbers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LARGE, generator=generator, dtype=torch.float64)


def test_large_tensors_arrive_through_shared_memory(workers):
    x = _numbers()
    (y,) = gradwire.rpc_sync("w1", far.same, args=(x,))
    assert torch.equal(x, y)
    assert far.shared_blocks() > 0
    assert gradwire.rpc_sync("w1", far.shared_blocks) > 0


def test_gradients_are_exact_through_shared_memory(workers):
    x, again = (_numbers().requires_grad_() for _ in range(2))
    with gradwire.context():
        y = gradwire.rpc_sync("w1", far.cubed, args=(x,))
        z = gradwire.rpc_sync("w2", far.add, args=(y, x))
        z.square().sum().backward()
    far.add(far.cubed(again), again).square().sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_what_a_worker_keeps_is_not_overwritten_by_what_comes_after(workers):
    gradwire.rpc_sync("w1", far.keep, args=([_numbers(1), _numbers(2)],))
    with ThreadPoolExecutor(3) as callers:
        for seed, (y,) in enumerate(
            callers.map(
                lambda seed: gradwire.rpc_sync("w1", far.same, args=(_numbers(seed),)), range(12)
            )
        ):
            assert torch.equal(y, _numbers(seed))
    first, second = gradwire.rpc_sync("w1", far.kept)
    assert torch.equal(first, _numbers(1))
    assert torch.equal(second, _numbers(2))


def test_a_worker_killed_while_it_holds_shared_memory_leaves_none_behind(workers):
    names = Path("/dev/shm")
    before = sorted(os.listdir(names)) if names.exists() else []
    gradwire.rpc_sync("w1", far.keep, args=(_numbers(1),))
    mine = gradwire.rpc_sync("w1", far.kept)
    assert far.shared_blocks() > 0
    workers["w1"].kill()
    with pytest.raises(gradwire.PeerLost):
        gradwire.rpc_sync("w1", far.same, args=(_numbers(2),))
    assert torch.equal(mine, _numbers(1))
    del mine
    assert eventually(lambda: far.shared_blocks() == 0)
    assert (sorted(os.listdir(names)) if names.exists() else []) == before


def test_shared_memory_can_be_switched_off(hosts):
    options = Options(listen="unix", shared_memory=False)
    with process_cluster(2, expose=[far], options=options, hosts=hosts):
        (y,) = gradwire.rpc_sync("w1", far.same, args=(_numbers(),))
        assert torch.equal(y, _numbers())
        assert far.shared_blocks() == 0
        assert gradwire.rpc_sync("w1", far.shared_blocks) == 0
