"""Calls between real processes, over each kind of link."""

from __future__ import annotations

import os

import pytest
import torch

import gradwire
from gradwire import NotExposed, RemoteError
from gradwire.current import current_worker
from tests.leftovers import eventually
from tests.processes import far

EIGHT_MIB = 1 << 20  # elements of 8 bytes


def test_a_call_runs_in_the_process_of_the_worker(linked):
    assert gradwire.rpc_sync("w1", far.pid) == linked["w1"].pid != os.getpid()
    assert gradwire.rpc_sync("w2", far.add, args=(2,), kwargs={"b": 3}) == 5
    assert gradwire.rpc_sync("w0", far.pid) == os.getpid()


def test_calls_nest_and_call_back(linked):
    route = ["w1", "w2", "w0", "w1"]

    names, y = gradwire.rpc_sync(route[0], far.through, args=(route[1:], torch.ones(2)))

    assert names == route
    assert torch.equal(y, torch.full((2,), 16.0))


def test_many_calls_are_under_way_at_once(linked):
    futures = [gradwire.rpc_async(f"w{1 + n % 2}", far.add, args=(n,)) for n in range(200)]

    assert torch.futures.wait_all(futures) == list(range(1, 201))
    assert futures[7].then(lambda future: future.wait() * 2).wait() == 16


def test_futures_of_two_processes_come_as_they_are_done(linked):
    gradwire.rpc_sync("w1", far.close_gate)
    late = gradwire.rpc_async("w1", far.wait_at_gate)
    early = gradwire.rpc_async("w2", far.add, args=(1,))

    with pytest.raises(gradwire.WaitTimeout, match="on w1, pending for"):
        late.result(timeout=0.01)
    done = gradwire.as_completed([late, early], timeout=60)
    assert next(done) is early
    assert gradwire.wait([late, early], timeout=0.01) == ({early}, {late})
    gradwire.rpc_sync("w1", far.open_gate)
    assert next(done) is late
    assert late.exception() is None


def test_eight_mebibytes_cross_unchanged(linked):
    there = torch.arange(EIGHT_MIB)

    back, row, number = gradwire.rpc_sync("w1", far.same, args=(there, there[:3], 7))

    assert torch.equal(back, there)
    assert torch.equal(row, there[:3])
    assert number == 7


def test_what_a_function_raises_is_raised_here_as_its_own_type(linked):
    with pytest.raises(far.Refused, match=r"Refused on w1: not like this") as caught:
        gradwire.rpc_sync("w1", far.refuse, args=("not like this",))
    assert isinstance(caught.value, RemoteError)
    assert "--- traceback on w1 ---" in str(caught.value)
    assert "in refuse" in caught.value.remote_traceback
    with pytest.raises(KeyError, match="KeyError on w2: nowhere"):
        gradwire.rpc_async("w2", far.fail_with_key, args=("nowhere",)).wait()


def test_every_frame_that_a_line_was_given_is_counted_by_its_channel(linked):
    """So that an interrupt, which ends a channel that counts one more, ends no other."""
    assert gradwire.rpc_sync("w1", far.add, args=(2,), kwargs={"b": 3}) == 5
    lines = [line for line in current_worker.find().agent._connections.readers.all() if line.reads]

    assert lines
    assert eventually(lambda: not any(line.has_lost_a_frame() for line in lines))


def test_what_is_not_exposed_is_refused_by_name(workers):
    with pytest.raises(NotExposed, match="posix:getcwd is not exposed on this worker"):
        gradwire.rpc_sync("w1", os.getcwd)


def test_a_thread_of_a_served_function_finds_its_worker(workers):
    assert gradwire.rpc_sync("w1", far.in_a_thread, args=("w2",)) == ["w2"]


def test_one_call_goes_to_several_workers(linked):
    x = torch.randn(EIGHT_MIB, dtype=torch.float64).requires_grad_()

    first, second, here = gradwire.rpc_sync(["w2", "w1", "w0"], far.cubed, args=(x,))
    (first + second * 2 + here).sum().backward()

    assert torch.equal(first, here)
    assert torch.equal(second, here)
    expected = x.detach() * x.detach() * 3
    assert torch.allclose(x.grad, expected * 4)


def test_what_some_of_several_workers_raise_is_a_group(linked):
    with pytest.raises(
        ExceptionGroup, match=r"2 of 2 workers: w1 \(Refused\), w2 \(Refused\)"
    ) as e:
        gradwire.rpc_sync(["w1", "w2"], far.refuse, args=("no",))
    assert e.group_contains(far.Refused, match="Refused on w2: no")


def test_processes_meet_at_a_barrier_and_gather(linked):
    mates = gradwire.group("mates", ["w0", "w1", "w2"])
    others = gradwire.rpc_async(["w1", "w2"], far.meet, args=(mates,))

    gradwire.barrier(mates)
    pids = gradwire.all_gather(os.getpid(), mates)

    assert pids == [os.getpid(), linked["w1"].pid, linked["w2"].pid]
    assert others.wait() == [pids, pids]
