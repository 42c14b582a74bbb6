"""Calls and passes have names in a profile, on both sides; without a profiler there are none."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import gradwire as gw
from gradwire.rpc.profiling import fetch_span, function_span
from gradwire.testing import cluster
from gradwire.torch_private import NOTHING, span

HERE = sys.modules[__name__]


@pytest.fixture(scope="module")
def workers():
    with cluster(2, expose=[HERE]) as made:
        yield made


@pytest.fixture
def main(workers):
    with workers[0].worker.scope():
        yield


def twice(x):
    return 2 * x


def fails():
    raise ValueError("as it must")


class Box:
    def get(self):
        return 7


def all_threads():
    return profile(
        activities=[ProfilerActivity.CPU],
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )


def names_in(profiled):
    return [event.name for event in profiled.events()]


@pytest.mark.usefixtures("main")
def test_the_caller_s_ranges_say_who_calls_what_where():
    x = torch.ones(2)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        gw.rpc_sync("w1", twice, args=(x,))
        gw.rpc_sync("w1", torch.sin, args=(x,))
        gw.rpc_async("w1", twice, args=(x,)).wait()
        rref = gw.remote("w1", Box)
        rref.rpc_sync().get()
        gw.remote("w1", twice, args=(x,)).to_here()
        with pytest.raises(ValueError, match="as it must"):
            gw.rpc_sync("w0", fails)

    names = [name for name in names_in(profiled) if "#" in name]
    assert names == [
        "rpc_sync#twice(w0 -> w1)",
        "rpc_sync#sin(w0 -> w1)",
        "rpc_async#twice(w0 -> w1)",
        "rpc_remote#Box(w0 -> w1)",
        "rpc_sync#get(w0 -> w1)",
        "rpc_remote#twice(w0 -> w1)",
        "to_here#(w0)->(w1)",
        "rpc_sync#fails(w0 -> w0)",
    ]


@pytest.mark.usefixtures("main")
def test_the_callee_s_range_is_the_function_with_what_it_computes():
    with all_threads() as profiled:
        gw.rpc_sync("w1", twice, args=(torch.ones(2),))

    (event,) = [event for event in profiled.events() if event.name == "twice"]
    inside = [
        other.name
        for other in profiled.events()
        if other.thread == event.thread
        and event.time_range.start <= other.time_range.start <= event.time_range.end
    ]
    assert "aten::mul" in inside
    (call,) = [e for e in profiled.events() if e.name == "rpc_sync#twice(w0 -> w1)"]
    assert call.thread != event.thread


@pytest.mark.usefixtures("main")
def test_a_backward_has_a_range_on_every_worker():
    x = torch.ones(2, requires_grad=True)
    with all_threads() as profiled, gw.context() as context:
        gw.backward(context, [gw.rpc_sync("w1", twice, args=(x,)).sum()])
        gw.rpc_sync("w1", twice, args=(x,)).sum().backward()

    here, *there = [name for name in names_in(profiled) if name.startswith("gradwire backward")]
    which = here.removeprefix("gradwire backward of ")
    assert which.startswith("c0.")
    assert [name.partition(" of ")[2] for name in there] == [which, ""]
    assert all(name.startswith("gradwire backward p0.") for name in there)


@pytest.mark.usefixtures("main")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_autograd_profiler_sees_them_too():
    with profiler.profile() as profiled:
        gw.rpc_sync("w1", twice, args=(torch.ones(2),))

    assert "rpc_sync#twice(w0 -> w1)" in [event.name for event in profiled.function_events]


def test_without_a_profiler_there_is_no_range():
    assert span("%s", 1) is NOTHING
    assert fetch_span("a", "b") is NOTHING
    assert function_span("m:f") is NOTHING
