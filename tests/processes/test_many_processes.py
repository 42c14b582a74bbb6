"""Many processes of one run: all call all, and one backward goes over all of them."""

from __future__ import annotations

import os

import pytest
import torch

import gradwire as gw
from gradwire import Options, Timeouts
from tests.strength import count

COUNT = count(64, 12)
NAMES = [f"w{n}" for n in range(COUNT)]

pytestmark = pytest.mark.usefixtures("no_secret")


def process():
    return os.getpid()


def processes_seen():
    futures = [gw.rpc_async(name, process) for name in NAMES]
    return frozenset(future.wait() for future in futures)


def main():
    seen = [gw.rpc_async(name, processes_seen) for name in NAMES]
    (processes,) = {future.wait() for future in seen}
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    y = x
    for name in NAMES[1:]:
        y = gw.rpc_sync(name, torch.sin, args=(y,))
    spread = [gw.rpc_async(name, torch.cos, args=(x,)) for name in NAMES[1:]]
    (y + sum(future.wait() for future in spread)).sum().backward()
    return len(processes), x.grad


def expected():
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in NAMES[1:]:
        y = torch.sin(y)
    (y + sum(torch.cos(x) for _ in NAMES[1:])).sum().backward()
    return x.grad


@pytest.mark.timeout(600)
def test_all_call_all_and_one_backward_goes_over_all(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = Options(timeouts=Timeouts(call=300, connect=60, handshake=60, backward=300))

    here = [process, processes_seen]
    processes, gradient = gw.run(main, COUNT, expose=here, options=options)

    assert processes == COUNT
    assert torch.allclose(gradient, expected(), rtol=0, atol=1e-14)
