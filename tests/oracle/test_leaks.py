"""What the oracle says of a program that leaves something."""

from __future__ import annotations

import threading

import pytest
import torch

import gradwire
from gradwire import Options
from tests.oracle import holders, leaks
from tests.oracle.check import workers

KEPT: dict[str, torch.Tensor] = {}


def keep(x):
    KEPT["mine"] = x.sin().cos()


@pytest.fixture
def on_w0(monkeypatch):
    monkeypatch.setattr(leaks, "SECONDS", 0.0)
    monkeypatch.setattr(holders.faulthandler, "dump_traceback", lambda *_, **__: None)
    with workers(Options()) as on_w0:
        yield on_w0


def test_it_names_the_edge_and_the_tensor_that_leads_to_it_through_cpp(on_w0):
    def program():
        KEPT["mine"] = gradwire.rpc_sync("w1", torch.sin, args=(torch.ones(3, requires_grad=True),))
        KEPT["mine"] = (KEPT["mine"] * 2).cos()

    on_w0(program)

    left = on_w0(leaks.what_is_left, 2)
    KEPT.clear()
    assert left.startswith("w0: {'sent edges': 1, 'received edges': 1}; w1: {'sent edges': 1")
    recv = next(line for line in left.splitlines() if "Recv" in line and "on w1" in line)
    assert "w0 has it among the received, w1 has it among the sent, held by nothing" in recv
    assert "a Tensor of CosBackward0 leads there, held by dict('mine')" in left


def test_a_thread_that_is_still_under_the_hooks_of_a_call_is_seen(on_w0):
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    found = []

    def main():
        with hooks:
            found.append(holders.hooks_here())
        found.append(holders.hooks_here())

    thread = threading.Thread(target=main, name="a thread")
    thread.start()
    thread.join()

    assert found[0].endswith("<lambda> on a thread")
    assert found[1] is None


def test_what_a_dying_generator_raises_is_noted():
    def generator():
        try:
            yield
        finally:
            raise ValueError("on purpose")

    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", printed.append)
        with leaks.unseen() as raised:
            it = generator()
            next(it)
            del it

    assert len(printed) == 1
    assert "ValueError('on purpose')" in raised[0]
