"""Waiting for several futures at once."""

from __future__ import annotations

import threading

import pytest
import torch

from gradwire.compat import futures
from gradwire.compat.futures import collect_all, wait_all
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.errors import DeadlinePassed
from gradwire.testing import cluster
from tests.background import Background

GATE = threading.Event()


def fail():
    raise ValueError("on purpose")


def never():
    return torch.futures.Future()


def failed():
    future = never()
    future.set_exception(ValueError("on purpose"))
    return future


def done(value):
    future = never()
    future.set_result(value)
    return future


def test_all_values_come_in_order():
    first = never()
    all_of_them = collect_all([first, done(2)])
    assert not all_of_them.done()
    first.set_result(1)

    assert [future.value() for future in all_of_them.wait()] == [1, 2]
    assert wait_all([first, done(2)]) == [1, 2]
    assert collect_all([]).wait() == wait_all([]) == []


@pytest.mark.parametrize("wait", [wait_all, lambda futures: collect_all(futures).wait()])
def test_the_first_failure_is_raised_without_waiting_for_the_others(wait):
    with pytest.raises(ValueError, match="on purpose"):
        wait([never(), failed()])


def test_a_future_that_nobody_completes_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(futures, "FOREVER", 0.01)
    waiting = Background(lambda: wait_all([done(1), never()]))
    assert str(waiting.error(DeadlinePassed)).startswith(
        "1 of 2 futures were not completed in 0.01 s"
    )


def wait_at_gate():
    assert GATE.wait(20)
    return "went on"


def test_a_call_is_waited_for_until_its_own_deadline(monkeypatch):
    monkeypatch.setattr(futures, "FOREVER", 0.001)
    GATE.clear()
    with cluster(2, behavior=TORCH) as workers:
        call = workers[0].run(rpc.rpc_async, "w1", wait_at_gate)
        waiting = Background(lambda: wait_all([call, done(2)]))
        assert waiting.is_blocked()
        GATE.set()
        assert waiting.result() == ["went on", 2]


def collected_call():
    return collect_all([rpc.rpc_async("w1", fail)]).wait()


def test_the_failure_of_a_call_is_raised(capsys):
    with cluster(2, behavior=TORCH) as workers, pytest.raises(ValueError, match="on purpose"):
        workers[0].run(collected_call)
    assert "on purpose" in capsys.readouterr().err
