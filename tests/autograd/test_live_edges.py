"""What holds graphs on a worker: a call that lists it, a report at shutdown, and cycles."""

from __future__ import annotations

import gc
import inspect
import logging

import pytest
import torch

import gradwire
from gradwire.autograd import engine
from gradwire.testing import cluster
from tests.leftovers import eventually

_kept: list[object] = []


def doubled(x):
    return 2 * x


def keep(x):
    _kept.append(x)


class Holder:
    """Something on a worker that holds a graph, and through it what a hook of that graph holds."""

    def __init__(self) -> None:
        self.tensor = None

    def hold(self, tensor):
        self.tensor = tensor


@pytest.fixture
def two():
    with cluster(2, expose=[doubled, keep, Holder]) as workers, workers[0].worker.scope():
        yield workers
    _kept.clear()


def test_each_is_listed_with_its_age_size_and_line(two):
    x = torch.ones(3, requires_grad=True)
    line = _line_of_the_next_statement()
    y = gradwire.rpc_sync("w1", doubled, args=(x,))
    (mine,) = gradwire.live_edges()
    (theirs,) = two[1].run(gradwire.live_edges)

    assert (mine.edge, mine.to, mine.bytes) == ("e0.0", "w1", 12)
    assert mine.line == f"{__file__}:{line}"
    assert mine.age >= 0
    assert (theirs.edge, theirs.to, theirs.line) == ("e1.0", "w0", "a result")
    del y
    gc.collect()
    assert eventually(lambda: not gradwire.live_edges())


def _line_of_the_next_statement() -> int:
    return inspect.currentframe().f_back.f_lineno + 1


def test_the_oldest_comes_first(two):
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        gradwire.rpc_sync("w1", keep, args=(x,))
    assert [edge.edge for edge in gradwire.live_edges()] == ["e0.0", "e0.1", "e0.2"]


def _cycle():
    """A hook here holds a reference to a value on w1 that holds the graph with that hook."""
    holder = gradwire.remote("w1", Holder)
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: holder.owner_name())
    holder.rpc_sync().hold(y)


def test_a_cycle_over_workers_lives_until_its_context_ends(two):
    with gradwire.context():
        _cycle()
        gc.collect()
        assert gradwire.live_edges()
    gc.collect()
    assert not gradwire.live_edges()
    assert eventually(lambda: two[0].worker.refs.statistics().held == 0), "the reference too"


def test_a_cycle_over_workers_without_a_context_is_reported_when_they_leave(
    two, caplog, monkeypatch
):
    monkeypatch.setattr(engine, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(engine, "_MANY", 1)
    _cycle()
    gc.collect()
    with caplog.at_level(logging.WARNING, "gradwire"):
        two[0].worker.engine.report_leaks()
        monkeypatch.setattr(engine, "_MANY", 2)
        two[0].worker.engine.report_leaks()  # few of them are no warning
    (said,) = [record.getMessage() for record in caplog.records]
    caplog.clear()
    with caplog.at_level(logging.INFO, "gradwire"):
        two[0].worker.engine.report_leaks()
    assert [record.getMessage() for record in caplog.records] == [said]
    assert "w0 shuts down with 1 edges that other workers have held" in said
    assert "e0.0" in said
    assert __file__ in said
