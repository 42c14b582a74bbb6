"""A profile shows what the calls of its thread run on other workers."""

from __future__ import annotations

import json
import logging
import threading

import pytest
import torch
from torch.autograd.profiler import record_function

from gradwire.compat import autograd as dist_autograd
from gradwire.compat.profiler_legacy import profile
from gradwire.compat.profiles.calls import AwaitedEvents, run_profiled, take_events
from gradwire.compat.profiles.recording import NotedCall, Wishes, maybe_recording
from gradwire.compat.rpc import api as rpc
from gradwire.compat.rpc.behavior import TORCH
from gradwire.compat.rpc.functions import async_execution
from gradwire.compat.rpc.server_process_global_profiler import _server_process_global_profile
from gradwire.errors import BadMessage, UsageError
from gradwire.testing import cluster
from gradwire.torch_private import is_profiled

ONES = torch.ones(4)


@pytest.fixture
def workers():
    with cluster(3, behavior=TORCH) as made:
        yield made


@pytest.fixture
def main(workers):
    with workers[0].worker.scope():
        yield


def twice(x):
    with record_function("of the user"):
        return 2 * x


def twice_on(to, x):
    return rpc.rpc_sync(to, twice, (x,))


@async_execution
def twice_later(to, x):
    return rpc.rpc_async(to, twice, (x,)).then(lambda done: done.wait() + 1)


@async_execution
def never(to):
    return rpc.rpc_async(to, fails)


def given(value):
    return value


def fails():
    raise KeyError("as it must")


def leaves_a_range_open():
    record_function("left open").__enter__()
    return 7


def names(profiled, node):
    return [event.name for event in profiled.function_events if event.node_id == node]


CALL = "rpc_{}#twice(w0 -> w1)#remote_op: {}"


@pytest.mark.usefixtures("main")
@pytest.mark.parametrize("kind", ["sync", "async", "remote"])
def test_a_profile_shows_what_a_call_runs_elsewhere(kind):
    with profile() as profiled:
        match kind:
            case "sync":
                value = rpc.rpc_sync("w1", twice, (ONES,))
            case "async":
                value = rpc.rpc_async("w1", twice, (ONES,)).wait()
            case _:
                reference = rpc.remote("w1", twice, (ONES,))
                reference._get_profiling_future().wait()
                value = reference.to_here()

    assert torch.equal(value, 2 * ONES)
    found = names(profiled, 1)
    assert CALL.format(kind, "of the user") in found
    assert CALL.format(kind, "aten::mul") in found
    assert f"rpc_{kind}#twice(w0 -> w1)" in names(profiled, 0)
    assert all(event.is_remote == (event.node_id == 1) for event in profiled.function_events)


@pytest.mark.usefixtures("main")
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_ran_elsewhere_ran_during_the_call(kind):
    with profile() as profiled:
        if kind == "sync":
            rpc.rpc_sync("w1", twice, (ONES,))
        else:
            rpc.rpc_async("w1", twice, (ONES,)).wait()
    (call,) = [e for e in profiled.function_events if e.name == f"rpc_{kind}#twice(w0 -> w1)"]
    (there,) = [e for e in profiled.function_events if e.name.endswith("aten::mul")]

    assert call.time_range.start < there.time_range.start
    assert there.time_range.end < call.time_range.end
    assert call.is_async == (kind == "async")


@pytest.mark.usefixtures("main")
def test_events_have_the_shapes_and_sizes_that_the_profile_asks_for():
    with profile(record_shapes=True, profile_memory=True) as asked:
        rpc.rpc_sync("w1", twice, (ONES,))
    with profile() as plain:
        rpc.rpc_sync("w1", twice, (ONES,))

    (there,) = [e for e in asked.function_events if e.name.endswith("aten::mul")]
    assert [4] in there.input_shapes
    assert there.cpu_memory_usage == 16
    assert not any(e.input_shapes or e.cpu_memory_usage for e in plain.function_events)


@pytest.mark.usefixtures("main")
def test_a_call_from_a_called_function_is_shown_through_both():
    with profile() as profiled:
        rpc.rpc_sync("w1", twice_on, ("w2", ONES))
    outer, inner = "rpc_sync#twice_on(w0 -> w1)", "rpc_sync#twice(w1 -> w2)"

    assert f"{outer}#remote_op: {inner}" in names(profiled, 1)
    assert f"{outer}#remote_op: {inner}#remote_op: aten::mul" in names(profiled, 2)


@pytest.mark.usefixtures("main")
@pytest.mark.parametrize("kind", ["sync", "remote"])
def test_a_function_that_answers_later_is_shown_with_what_it_waited_for(kind):
    with profile() as profiled:
        if kind == "sync":
            value = rpc.rpc_sync("w1", twice_later, ("w2", ONES))
        else:
            value = rpc.remote("w1", twice_later, ("w2", ONES)).to_here()
            # Its events are not waited for: they have left, but another thread takes them.
            return
    assert torch.equal(value, 2 * ONES + 1)
    assert any(name.endswith("remote_op: aten::mul") for name in names(profiled, 2))


@pytest.mark.usefixtures("main")
@pytest.mark.parametrize(("function", "args"), [(fails, ()), (never, ("w2",))])
def test_an_error_is_the_same_as_without_a_profile(function, args):
    raised = []
    for on in (False, True):
        with profile(enabled=on):
            with pytest.raises(Exception, match="as it must") as error:
                rpc.rpc_sync("w1", function, args)
            with pytest.raises(Exception, match="as it must"):
                rpc.rpc_async("w1", function, args).wait()
        raised.append(type(error.value))

    assert raised[0] is raised[1]


@pytest.mark.usefixtures("main")
@pytest.mark.parametrize("kind", ["sync", "async", "remote"])
def test_gradients_flow_through_a_profiled_call(kind):
    x = torch.ones(4, requires_grad=True)
    with profile(), dist_autograd.context() as context:
        match kind:
            case "sync":
                y = rpc.rpc_sync("w1", twice, (x,))
            case "async":
                y = rpc.rpc_async("w1", twice, (x,)).wait()
            case _:
                y = rpc.remote("w1", twice, (x,)).to_here()
        dist_autograd.backward(context, [y.sum()])
        (gradient,) = dist_autograd.get_gradients(context).values()

    assert gradient.tolist() == [2.0] * 4


@pytest.mark.usefixtures("main")
def test_what_a_profiled_call_returns_is_of_the_same_kind():
    parameter = torch.nn.Parameter(torch.ones(2))
    with profile(), torch.no_grad():
        found = [
            rpc.rpc_sync("w1", given, (parameter,)),
            rpc.rpc_async("w1", given, ((1, b"x"),)).wait(),
            rpc.rpc_sync("w1", given, (None,)),
        ]

    assert isinstance(found[0], torch.nn.Parameter)
    assert found[1:] == [(1, b"x"), None]


@pytest.mark.usefixtures("main")
def test_a_profiled_thread_that_serves_itself_shows_it_in_its_own_profile():
    with profile() as profiled:
        value, events = run_profiled(Wishes(), None, twice, ONES)

    assert (value.tolist(), events) == ([2.0] * 4, b"\x90")
    assert "of the user" in names(profiled, 0)


@pytest.mark.usefixtures("main")
def test_threads_with_profiles_of_their_own_do_not_mix(workers):
    found = {}

    def program(to):
        with workers[0].worker.scope(), profile() as profiled:
            rpc.rpc_async(to, twice, (ONES,)).wait()
        found[to] = {event.node_id for event in profiled.function_events if event.is_remote}

    threads = [threading.Thread(target=program, args=(to,)) for to in ("w1", "w2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {"w1": {1}, "w2": {2}}


@pytest.mark.usefixtures("main")
def test_the_trace_of_a_profile_is_json_with_the_events_of_peers(tmp_path):
    with profile() as profiled:
        rpc.rpc_sync("w1", twice, (ONES,))
    profiled.export_chrome_trace(str(tmp_path / "trace"))
    events = json.loads((tmp_path / "trace").read_text())

    assert CALL.format("sync", "aten::mul") in {event["name"] for event in events}


@pytest.mark.usefixtures("main")
def test_a_profile_that_takes_no_events_of_peers_asks_for_none():
    theirs = torch.autograd.profiler_legacy.profile
    with theirs() as profiled:
        assert (is_profiled(), maybe_recording()) == (True, None)
        value = rpc.rpc_sync("w1", twice, (ONES,))

    assert torch.equal(value, 2 * ONES)
    assert not [e for e in profiled.function_events if "remote_op" in e.name]


@pytest.mark.usefixtures("main")
def test_without_a_worker_a_profile_is_torch_s(workers):
    with profile() as profiled:
        torch.neg(ONES)

    assert [event.name for event in profiled.function_events] == ["aten::neg"]
    assert maybe_recording() is None


@pytest.mark.usefixtures("main")
def test_a_reference_made_without_a_profile_has_no_future_of_it():
    with pytest.raises(RuntimeError, match="Profiling future has not been set"):
        rpc.remote("w1", twice, (ONES,))._get_profiling_future()


@pytest.mark.usefixtures("main")
def test_a_function_that_leaves_a_range_open_answers_all_the_same(caplog):
    with profile(), caplog.at_level(logging.WARNING, "gradwire"):
        assert rpc.rpc_sync("w1", leaves_a_range_open) == 7


@pytest.mark.usefixtures("main")
def test_events_from_another_than_the_one_that_was_called_are_dropped(workers):
    call = NotedCall("key", 1, lambda: 5)
    number = workers[0].worker.part(AwaitedEvents).expect(call)
    with workers[2].worker.scope():
        rpc.rpc_sync("w0", take_events, (number, b"\x90"))
    assert call.ended is None

    with workers[1].worker.scope():
        rpc.rpc_sync("w0", take_events, (number, b"\x90"))
    assert call.ended == 5


def answer_plainly(wishes, home, function, /, *args, **kwargs):
    return function(*args, **kwargs)


def test_an_answer_without_events_is_refused(workers, monkeypatch):
    monkeypatch.setattr("gradwire.compat.profiles.calls.run_profiled", answer_plainly)
    with workers[0].worker.scope(), profile():
        with pytest.raises(BadMessage, match="was answered without the events"):
            rpc.rpc_sync("w1", twice, (ONES,))
        with pytest.raises(BadMessage, match="was answered without the events"):
            rpc.rpc_async("w1", twice, (ONES,)).wait()


# -- what a worker runs for others


@pytest.mark.usefixtures("main")
def test_a_profile_of_all_that_a_worker_serves(workers):
    outer, inner = _server_process_global_profile(), _server_process_global_profile()
    with workers[1].worker.scope():
        outer.__enter__()
    rpc.rpc_sync("w1", torch.neg, (ONES,))
    with workers[1].worker.scope():
        inner.__enter__()
    rpc.rpc_sync("w1", torch.abs, (ONES,))
    with workers[1].worker.scope():
        inner.__exit__(None, None, None)
        outer.__exit__(None, None, None)
    rpc.rpc_sync("w1", torch.exp, (ONES,))

    def calls(profiled):
        return [[e.name for e in call][:1] for call in profiled.process_global_function_events]

    assert calls(outer) == [["aten::neg"], ["aten::abs"]]
    assert calls(inner) == [["aten::abs"]]
    assert {e.name for e in inner.function_events} == {"aten::abs", "aten::empty"}
    starts = {e.name: e.time_range.start for e in outer.function_events}
    assert starts["aten::neg"] < starts["aten::abs"]
    assert workers[1].worker.server.around is None


def test_what_is_served_is_shown_to_a_profiled_caller_as_well(workers):
    served = _server_process_global_profile(record_shapes=True)
    with workers[1].worker.scope():
        served.__enter__()
    with workers[0].worker.scope(), profile() as profiled:
        rpc.rpc_sync("w1", twice, (ONES,))
    with workers[1].worker.scope():
        served.__exit__(None, None, None)

    assert CALL.format("sync", "aten::mul") in names(profiled, 1)
    assert "aten::mul" in {e.name for e in served.function_events}


def test_a_profile_of_what_is_served_is_left_where_it_was_entered(workers):
    profiled = _server_process_global_profile()
    with workers[1].worker.scope():
        profiled.__enter__()
        with pytest.raises(RuntimeError, match="not reentrant"):
            profiled.__enter__()
    with workers[2].worker.scope(), pytest.raises(UsageError, match="leave it on the worker"):
        profiled.__exit__(None, None, None)
