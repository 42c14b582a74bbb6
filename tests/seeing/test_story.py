"""Errors of lost workers, deadlines and passes end with what happened before them."""

import sys
import threading

import pytest
import torch

import gradwire as gw
from gradwire.errors import CallTimeout, PeerLost
from gradwire.events import Events
from gradwire.options import Options, Timeouts
from gradwire.testing import cluster
from gradwire.testing.clock import ManualClock

HERE = sys.modules[__name__]
GATE = threading.Event()


def hold(x):
    GATE.wait(30)
    return x


def times_leaf(x):
    return x * torch.ones(2, requires_grad=True)


@pytest.fixture(autouse=True)
def _gate():
    GATE.clear()
    yield
    GATE.set()


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", []))


def named(worker):
    return f"w{worker}"


def test_a_story_is_of_the_last_seconds_oldest_first():
    now = [0.0]
    events = Events(lambda: now[0])
    events.note("was connected", "", 1)
    now[0] = 20.0
    events.note("was lost", "", 1, "the connection was reset")
    now[0] = 21.5
    events.note("cancel", "w1#3", 1)
    now[0] = 22.0

    assert events.story(named).splitlines() == [
        "  2.000 s before: w1: was lost the connection was reset",
        "  0.500 s before: w1: cancel w1#3",
    ]


def test_of_many_events_the_last_are_told():
    events = Events(lambda: 0.0)
    for n in range(20):
        events.note("cancel", f"w1#{n}", 1)

    first, *lines = events.story(named).splitlines()

    assert first == "  12 events, and"
    assert lines == [f"  0.000 s before: w1: cancel w1#{n}" for n in range(12, 20)]


def test_nothing_happened_is_no_story():
    assert Events(lambda: 0.0).story(named) == ""


def test_a_call_that_is_late_tells_what_happened_before():
    clock = ManualClock()
    with cluster(3, expose=[HERE], clock=clock) as workers:
        w0 = workers[0]
        w0.run(gw.rpc_sync, "w1", torch.neg, args=(torch.ones(2),))
        w0.run(gw.rpc_sync, "w2", torch.neg, args=(torch.ones(2),))
        call = w0.run(gw.rpc_async, "w1", hold, args=(1,), timeout=5)
        clock.advance(3)
        workers[2].worker.close()
        with pytest.raises(PeerLost):
            w0.run(gw.rpc_sync, "w2", torch.neg, args=(torch.ones(2),))
        clock.advance(2.1)
        with pytest.raises(CallTimeout) as late:
            w0.run(call.wait)
        GATE.set()

    note = notes_of(late.value)
    assert note.startswith("before this, on w0:\n")
    assert "2.100 s before: w2: was lost" in note


def test_a_trace_makes_the_story_longer():
    clock = ManualClock()
    with cluster(2, expose=[HERE], clock=clock) as workers:

        def program():
            with gw.trace(show=False):
                gw.rpc_sync("w1", torch.neg, args=(torch.ones(2),))
                call = gw.rpc_async("w1", hold, args=(1,), timeout=5)
                clock.advance(5.1)
                with pytest.raises(CallTimeout) as late:
                    call.wait()
            GATE.set()
            return late.value

        note = notes_of(workers[0].run(program))

    assert "5.100 s before: w1: call " in note
    assert "torch.neg" in note


def test_a_pass_that_fails_tells_it_too():
    options = Options(timeouts=Timeouts(backward=30))
    with cluster(3, expose=[HERE], options=options) as workers:

        def program():
            x = torch.ones(2, requires_grad=True)
            y = gw.rpc_sync("w2", times_leaf, args=(gw.rpc_sync("w1", times_leaf, args=(x,)),))
            workers[1].worker.close()
            with pytest.raises(PeerLost) as lost:
                y.sum().backward()
            return lost.value

        note = notes_of(workers[0].run(program))

    assert "before this, on w0:" in note
    assert "w1: was lost" in note
