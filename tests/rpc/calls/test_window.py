"""A fast caller waits for a slow callee, and nothing that must go on is held up."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import gradwire as gw
from gradwire.agent.requests.promise import Pending, Promise
from gradwire.agent.requests.timer import MonotonicClock
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.errors import CallTimeout
from gradwire.testing import cluster
from tests.leftovers import eventually

HERE = sys.modules[__name__]
GATES: dict[str, threading.Event] = {}
SEEN: list[int] = []
KIB = torch.zeros(256)


@pytest.fixture
def workers():
    GATES["open"] = threading.Event()
    SEEN.clear()
    options = gw.Options(limits=gw.Limits(in_flight=8 << 10))
    with cluster(2, expose=[HERE], options=options) as made:
        yield made
        GATES["open"].set()


def slow(x, n):
    SEEN.append(n)
    assert GATES["open"].wait(30)
    return n


def there_and_back(times, x):
    if not times:
        return 0
    me = gw.get_worker_info().name
    return 1 + gw.rpc_sync("w0" if me == "w1" else "w1", there_and_back, args=(times - 1, x))


def test_no_more_is_under_way_than_the_window_holds(workers):
    def program():
        futures = []

        def flood():
            futures.extend(gw.rpc_async("w1", slow, args=(KIB, n)) for n in range(20))

        caller = threading.Thread(target=workers[0].run, args=(flood,))
        caller.start()
        assert eventually(
            lambda: len(SEEN) == 3
        )  # the fourth would not fit with its head; each counts 1 KiB more
        assert len(workers[0].worker.agent._calls) == 3
        GATES["open"].set()
        caller.join(30)
        return [future.wait() for future in futures]

    assert workers[0].run(program) == list(range(20))


def test_a_call_larger_than_the_window_goes_by_itself(workers):
    GATES["open"].set()
    assert workers[0].run(gw.rpc_sync, "w1", slow, (torch.zeros(1 << 16), 7)) == 7


def test_who_waits_too_long_is_told_why(workers):
    def program():
        under_way = [gw.rpc_async("w1", slow, args=(KIB, n)) for n in range(3)]
        with pytest.raises(CallTimeout, match=r"bytes of calls to the same worker have no answer"):
            gw.rpc_async("w1", slow, args=(KIB, 4), timeout=0.05)
        GATES["open"].set()
        assert [future.wait() for future in under_way] == [0, 1, 2]

    workers[0].run(program)


def test_calls_of_functions_that_were_called_do_not_wait(workers):
    assert workers[0].run(gw.rpc_sync, "w1", there_and_back, (20, KIB)) == 20


def test_each_message_is_uncounted_once():
    clock, window = MonotonicClock(), PeerLimit("in_flight", 10, one_may_exceed=True)
    first, second, third = (Pending(1, "f", 0.0, float("inf"), Promise()) for _ in range(3))
    ended = {}
    window.count_when_free(first, 8, clock, ended)
    window.count_anyway(second, 8)
    assert window.taken(1) == 16
    window.uncount(first, ended)
    window.uncount(first, ended)
    assert window.taken(1) == 8
    window.uncount(second, ended)
    assert ended == {1: 2}
    window.count_when_free(third, 10, clock, ended)
    assert (first.size, second.size, third.size) == (0, 0, 10)
