"""What a worker has done and holds, as it counts it."""

from __future__ import annotations

import sys
import threading

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.agent.links.traffic import Traffic
from gradwire.agent.peers.directory import Directory, Member
from gradwire.errors import CallTimeout, Cancelled, PeerLost
from gradwire.seeing.counters import MOST_PEERS, Counts, _named, read_counts
from gradwire.testing import cluster
from tests.leftovers import eventually

HERE = sys.modules[__name__]
GATES: dict[str, threading.Event] = {}


@pytest.fixture
def workers():
    GATES["open"] = threading.Event()
    with cluster(3, expose=[HERE]) as made:
        yield made
        GATES["open"].set()


def fine(x=None):
    return x


def broken():
    raise ValueError("no")


def slow():
    assert GATES["open"].wait(30)


@gw.async_execution
def later(is_well):
    future = torch.futures.Future()
    if is_well:
        future.set_result(1)
    else:
        future.set_exception(ValueError("no"))
    return future


def counts(workers, n):
    return read_counts(workers[n].worker)


def carried(workers, n, peer):
    """The bytes sent to the peer and received from it, by all ways."""
    mine = [each for each in counts(workers, n).traffic if each.peer == peer]
    return sum(each.sent for each in mine), sum(each.received for each in mine)


def test_calls_are_counted_once_by_how_they_ended(workers):
    def program():
        for _ in range(3):
            gw.rpc_sync("w1", fine)
        for function, args in ((broken, ()), (later, (False,)), (torch.square, ("text",))):
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                gw.rpc_sync("w1", function, args=args)
        gw.rpc_sync("w1", later, args=(True,))
        gw.rpc_async("w2", fine).wait()
        gw.remote("w2", fine, args=(1,)).to_here()

    workers[0].run(program)

    assert counts(workers, 0).made == {"answered": {"w1": 4, "w2": 2}, "raised": {"w1": 3}}
    assert eventually(
        lambda: counts(workers, 1).served == {"answered": {"w0": 4}, "raised": {"w0": 3}}
    )
    assert eventually(lambda: counts(workers, 2).served == {"answered": {"w0": 2}})
    assert counts(workers, 0).served == counts(workers, 1).made == {}


def test_calls_that_nobody_answered_in_time_are_counted_apart(workers):
    def program():
        with pytest.raises(CallTimeout):
            gw.rpc_sync("w1", slow, timeout=0.02)
        waiting = gw.rpc_async("w2", slow)
        waiting.cancel()
        with pytest.raises(Cancelled):
            waiting.wait()
        assert counts(workers, 0).in_flight == 0
        lost = gw.rpc_async("w2", slow)
        assert counts(workers, 0).in_flight == 1
        assert counts(workers, 0).oldest_wait > 0
        assert eventually(lambda: counts(workers, 2).serving)
        workers[2].worker.agent.hang_up(0, "a test")
        with pytest.raises(PeerLost):
            lost.wait()

    workers[0].run(program)

    made = counts(workers, 0).made
    assert made == {"late": {"w1": 1}, "cancelled": {"w2": 1}, "lost": {"w2": 1}}
    assert counts(workers, 0).oldest_wait == 0
    assert counts(workers, 0).losses == {"w2": 1}


def test_a_call_that_could_not_leave_is_counted(workers):
    workers[1].worker.close()

    with pytest.raises(PeerLost):
        workers[0].run(gw.rpc_sync, "w1", fine)

    assert counts(workers, 0).made == {"unsent": {"w1": 1}}
    assert counts(workers, 0).peers == {"connected": 0, "silent": 0, "unconnected": 2}


def test_bytes_survive_the_end_of_a_connection(workers):
    x = torch.zeros(1000)

    def call():
        workers[0].run(gw.rpc_sync, "w1", fine, (x,))

    call()
    first = carried(workers, 0, "w1")
    assert all(4000 < each < 6000 for each in first)
    workers[0].worker.agent.hang_up(1, "a test")
    assert carried(workers, 0, "w1") == first
    call()

    again = carried(workers, 0, "w1")
    assert all(after - before > 4000 for after, before in zip(again, first, strict=True))
    assert eventually(lambda: carried(workers, 1, "w0") == carried(workers, 0, "w1")[::-1])


def test_a_worker_counts_what_it_holds(workers):
    def program():
        kept = gw.remote("w1", fine, args=(torch.ones(2),))
        kept.to_here()
        x = torch.ones(2, requires_grad=True)
        y = gw.rpc_sync("w1", fine, args=(x,))
        assert counts(workers, 0).references == counts(workers, 1).values == 1
        assert counts(workers, 0).live_edges == counts(workers, 1).live_edges == 1
        with gw.context():
            assert counts(workers, 0).contexts == 1
        y.sum().backward()
        z = x * 1
        z.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gw.rpc_sync("w1", fine, args=(z,)).sum().backward()

    workers[0].run(program)

    assert counts(workers, 0).passes == {"answered": 1, "raised": 1}
    assert counts(workers, 0).contexts == counts(workers, 0).active_passes == 0
    assert counts(workers, 0).restarts == counts(workers, 0).life == 0


def test_steps_and_restarts_are_counted(workers):
    def program():
        parameter = gw.remote("w1", torch.nn.Parameter, args=(torch.ones(2),))
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
        optimizer.step()
        return optimizer

    optimizer = workers[0].run(program)
    assert counts(workers, 0).steps == {"answered": 1, "raised": 0}

    workers.restart(1)
    with pytest.raises(gw.StepFailed):
        workers[0].run(optimizer.step)

    assert counts(workers, 0).steps == {"answered": 1, "raised": 1}
    assert counts(workers, 1).steps == {"answered": 0, "raised": 0}
    assert counts(workers, 1).restarts == 1
    assert counts(workers, 0).losses == {"w1": 1}


def test_reading_makes_nothing(workers):
    before = dict(workers[0].worker._parts)

    counts(workers, 0)

    assert workers[0].worker._parts == before


def test_counts_can_be_sent(workers):
    workers[0].run(gw.rpc_sync, "w1", fine)
    read = counts(workers, 0)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(read), type=Counts) == read


class Wire:
    """A channel that has carried so much."""

    def __init__(self, sent, received):
        self.both = sent, received

    def carried(self):
        return {"tcp": self.both}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.booleans())))
def test_bytes_are_summed_over_channels_of_now_and_before(channels):
    traffic, open_now, sums = Traffic(), {}, {}
    for peer, sent, received, is_over in channels:
        wire = Wire(sent, received)
        if is_over:
            traffic.ended(peer, [wire])
        else:
            open_now.setdefault(peer, []).append(wire)
        before = sums.get((peer, "tcp"), (0, 0))
        sums[peer, "tcp"] = before[0] + sent, before[1] + received

    assert traffic.with_open(open_now) == traffic.with_open(open_now) == sums


def test_the_names_of_peers_are_bounded():
    numbers = [0, MOST_PEERS - 1, MOST_PEERS, 7 * MOST_PEERS]
    directory = Directory(0, [Member(n, f"w{n}", "memory://") for n in numbers])

    named = _named(directory, dict.fromkeys(numbers, 2))

    assert named == {"w0": 2, f"w{MOST_PEERS - 1}": 2, "other": 4}
