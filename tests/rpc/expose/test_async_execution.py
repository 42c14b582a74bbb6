"""Functions that answer later, and futures that follow futures."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import gradwire as gw
from gradwire.testing import cluster

HERE = sys.modules[__name__]
FUTURES: dict[str, torch.futures.Future] = {}


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made
        FUTURES.clear()


@gw.async_execution
def brought(name):
    return FUTURES.setdefault(name, torch.futures.Future())


@gw.async_execution
def doubled_at(to, x):
    return gw.rpc_async(to, torch.sin, args=(x,)).then(lambda future: future.wait() * 2)


@gw.async_execution
def refused():
    future = torch.futures.Future()
    future.set_exception(KeyError("not today"))
    return future


@gw.async_execution
def forgotten():
    return 3


class Later:
    """An object whose method answers later."""

    @gw.async_execution
    def value(self, x):
        future = torch.futures.Future()
        future.set_result(x + 1)
        return future


def test_the_answer_is_what_the_future_brings_and_no_thread_waits(workers):
    def program():
        under_way = [gw.rpc_async("w1", brought, args=(f"{n}",)) for n in range(100)]
        threads = threading.active_count()
        for n in range(100):
            FUTURES.setdefault(f"{n}", torch.futures.Future()).set_result(n)
        assert [future.wait() for future in under_way] == list(range(100))
        return threads

    assert workers[0].run(program) < 100


def test_a_graph_goes_through_it(workers):
    x = torch.ones(2, requires_grad=True)

    def program():
        with gw.context():
            gw.rpc_sync("w1", doubled_at, args=("w2", x)).sum().backward()

    workers[0].run(program)
    assert torch.equal(x.grad, 2 * torch.cos(torch.ones(2)))


def test_what_it_fails_with_is_raised(workers):
    with pytest.raises(KeyError, match="not today"):
        workers[0].run(gw.rpc_sync, "w1", refused)


def test_what_is_no_future_is_refused(workers):
    with pytest.raises(gw.UsageError, match=r"must return a .*Future object") as error:
        workers[0].run(gw.rpc_sync, "w1", forgotten)
    assert "return the future itself from forgotten" in str(error.value)


def test_it_may_be_kept_and_be_a_method(workers):
    def program():
        later = gw.remote("w1", Later)
        assert later.rpc_sync().value(1) == 2
        assert later.remote().value(2).to_here() == 3
        with pytest.raises(KeyError, match="not today"):
            gw.remote("w1", refused).to_here()

    workers[0].run(program)


def test_a_future_follows_another(workers):
    def program():
        first = gw.rpc_async("w1", torch.add, args=(torch.ones(1), 1))
        second = first.follow(lambda came: gw.rpc_async("w2", torch.mul, args=(came.wait(), 3)))
        assert second.wait().item() == 6
        failing = first.follow(lambda _: gw.rpc_async("w2", refused))
        with pytest.raises(KeyError, match="not today"):
            failing.wait()
        with pytest.raises(ZeroDivisionError):
            first.follow(lambda _: 1 / 0).wait()

    workers[0].run(program)
