"""Spans of calls, passes and steps, and what of them crosses."""

from __future__ import annotations

import sys
import threading

import msgspec
import pytest
import torch

import gradwire as gw
from gradwire.errors import BadMessage
from gradwire.rpc.messages import Body, Call, TraceParent
from gradwire.testing import cluster
from gradwire.wire.message import Kinds, encode, kind_of
from tests.leftovers import eventually

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

HERE = sys.modules[__name__]
FINE, BROKEN = f"gradwire/{__name__}.fine", f"gradwire/{__name__}.broken"
GATES: dict[str, threading.Event] = {}


@pytest.fixture
def workers():
    GATES["open"] = threading.Event()
    with cluster(3, expose=[HERE]) as made:
        yield made
        GATES["open"].set()


@pytest.fixture
def provider():
    made = TracerProvider(shutdown_on_exit=False)
    made.exporter = InMemorySpanExporter()
    made.add_span_processor(SimpleSpanProcessor(made.exporter))
    yield made
    made.shutdown()


@pytest.fixture
def traced(workers, provider):
    for worker in workers:
        worker.run(gw.otel.enable, provider)
    return workers


def finished(provider, count):
    """The spans by name, once there are so many."""
    assert eventually(lambda: len(provider.exporter.get_finished_spans()) >= count, 5)
    spans = provider.exporter.get_finished_spans()
    assert len(spans) == count, [span.name for span in spans]
    found = {}
    for span in spans:
        found.setdefault(span.name, []).append(span)
    return found


def inside(provider, program):
    """Run it inside a span, which is returned with what it returns."""
    with provider.get_tracer("test").start_as_current_span("program") as span:
        return span, program()


def fine(x=None):
    return x


def broken():
    raise ValueError("the secret is 42")


def relay(to):
    return gw.rpc_sync(to, fine)


def slow():
    assert GATES["open"].wait(30)


@gw.async_execution
def later():
    future = torch.futures.Future()
    GATES["future"] = future
    return future


def test_a_call_inside_a_span_is_its_child_on_both_workers(traced, provider):
    span, _ = inside(provider, lambda: traced[0].run(gw.rpc_sync, "w1", fine, (torch.ones(4),)))

    found = finished(provider, 3)
    client, server = sorted(found[FINE], key=lambda each: each.kind != SpanKind.CLIENT)
    assert client.parent.span_id == span.get_span_context().span_id
    assert server.kind == SpanKind.SERVER
    assert server.parent.span_id == client.context.span_id
    assert server.parent.is_remote
    assert {each.context.trace_id for each in (client, server)} == {span.context.trace_id}
    about = {"rpc.system.name": "gradwire", "rpc.method": f"{__name__}.fine"}
    size = client.attributes["gradwire.sent.bytes"]
    assert 16 < size < 500
    mine = {"gradwire.worker": "w0", "gradwire.peer": "w1", "gradwire.sent.bytes": size}
    assert client.attributes == about | mine
    assert server.attributes == about | {"gradwire.worker": "w1"}
    assert client.start_time <= server.start_time <= server.end_time <= client.end_time


def test_a_trace_goes_on_through_a_worker(traced, provider):
    inside(provider, lambda: traced[0].run(gw.rpc_sync, "w1", relay, ("w2",)))

    found = finished(provider, 5)
    parents = {span.context.span_id: span for spans in found.values() for span in spans}
    (deepest,) = [each for each in found[FINE] if each.kind == SpanKind.SERVER]
    way = [deepest]
    while way[-1].parent is not None:
        way.append(parents[way[-1].parent.span_id])
    assert [span.attributes.get("gradwire.worker") for span in way] == [
        "w2",
        "w1",
        "w1",
        "w0",
        None,
    ]


@pytest.mark.parametrize("make", ["rpc_async", "remote"])
def test_a_call_that_nobody_waits_for_has_its_span_too(traced, provider, make):
    def program():
        made = getattr(gw, make)("w1", fine)
        return made.wait() if make == "rpc_async" else made.to_here()

    inside(provider, lambda: traced[0].run(program))

    assert len(finished(provider, 3)[FINE]) == 2


def test_the_span_of_an_error_says_its_type_and_no_values(traced, provider):
    def program():
        with pytest.raises(ValueError, match="42"):
            gw.rpc_sync("w1", broken)

    inside(provider, lambda: traced[0].run(program))

    for span in finished(provider, 3)[BROKEN]:
        assert not span.status.is_ok
        assert span.attributes["error.type"].endswith("ValueError")
        assert span.events == ()
        assert span.status.description is None
        assert "secret" not in span.to_json()


def test_a_call_that_cannot_leave_ends_its_span(traced, provider):
    traced[1].worker.close()

    def program():
        with pytest.raises(gw.PeerLost):
            gw.rpc_sync("w1", fine)

    inside(provider, lambda: traced[0].run(program))

    (span,) = finished(provider, 2)[FINE]
    assert span.attributes["error.type"] == "unsent"


def test_a_call_that_is_late_ends_its_span(traced, provider):
    def program():
        with pytest.raises(gw.CallTimeout):
            gw.rpc_sync("w1", slow, timeout=0.02)
        GATES["open"].set()

    inside(provider, lambda: traced[0].run(program))

    spans = finished(provider, 3)[f"gradwire/{__name__}.slow"]
    (late,) = [each for each in spans if each.kind == SpanKind.CLIENT]
    assert late.attributes["error.type"] == "CallTimeout"


def test_the_span_of_a_future_ends_with_the_future(traced, provider):
    def program():
        made = gw.rpc_async("w1", later)
        assert eventually(lambda: "future" in GATES)
        assert provider.exporter.get_finished_spans() == ()
        GATES["future"].set_result(7)
        return made.wait()

    assert inside(provider, lambda: traced[0].run(program))[1] == 7

    assert len(finished(provider, 3)[f"gradwire/{__name__}.later"]) == 2


def test_a_pass_and_a_step_are_spans_with_their_participants(traced, provider):
    x = torch.ones(2, requires_grad=True)

    def program():
        parameter = gw.remote("w2", torch.nn.Parameter, args=(torch.ones(2),))
        optimizer = gw.DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
        provider.exporter.clear()
        y = gw.rpc_sync("w1", fine, args=(x,))
        y.sum().backward()
        optimizer.step()

    with provider.get_tracer("test").start_as_current_span("program") as span:
        traced[0].run(program)

    def named(name):
        return [s for s in provider.exporter.get_finished_spans() if s.name == f"gradwire/{name}"]

    assert eventually(lambda: named("backward") and named("step"), 5)
    for name, participant in (("backward", "w1"), ("step", "w2")):
        (made,) = named(name)
        assert made.attributes["gradwire.participants"] == (participant,)
        assert made.parent.span_id == span.context.span_id


@pytest.fixture
def sent(traced, monkeypatch):
    """The traceparents of the calls that w0 makes."""
    found, agent = [], traced[0].worker.agent
    issue = agent.issue

    def record(pending, message, payload=()):
        if isinstance(message, Call):
            found.append(message.traceparent)
        issue(pending, message, payload)

    monkeypatch.setattr(agent, "issue", record)
    return found


def test_nothing_is_made_or_sent_outside_of_a_span(traced, provider, sent):
    traced[0].run(gw.rpc_sync, "w1", fine)
    inside(provider, lambda: traced[0].run(gw.rpc_sync, "w1", fine))

    assert sent[0] is None
    assert sent[1] is not None
    assert len(finished(provider, 3)[FINE]) == 2


def test_a_worker_that_did_not_enable_it_serves_without_a_span(workers, provider):
    workers[0].run(gw.otel.enable, provider)

    inside(provider, lambda: workers[0].run(gw.rpc_sync, "w1", fine))

    assert len(finished(provider, 2)[FINE]) == 1


def test_a_worker_that_disables_it_makes_no_more(traced, provider):
    for worker in traced:
        worker.run(gw.otel.disable)

    inside(provider, lambda: traced[0].run(gw.rpc_sync, "w1", fine))

    assert list(finished(provider, 1)) == ["program"]
    assert traced[0].worker.events.observer is None


def test_a_span_that_is_not_sampled_is_passed_on_and_not_recorded(traced, provider, sent):
    context = trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(0))
    with trace.use_span(trace.NonRecordingSpan(context)):
        traced[0].run(gw.rpc_sync, "w1", fine)
    inside(provider, lambda: traced[0].run(gw.rpc_sync, "w1", fine))

    assert sent[0].startswith(f"00-{1:032x}-")
    assert sent[0].endswith("-00")
    assert len(finished(provider, 3)[FINE]) == 2


GOOD = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GOOD + "\n",
        GOOD[:-1],
        GOOD + "0",
        GOOD.upper(),
        GOOD.replace("00-", "01-", 1),
        GOOD.replace("ab", "g0"),
        GOOD.replace("-", "_"),
        f"00-{'0' * 32}-{'cd' * 8}-01",
        f"00-{'ab' * 16}-{'0' * 16}-01",
        GOOD[:-1] + "\n",
        GOOD.replace("a", "\u0661"),
        7,
    ],
)
def test_a_traceparent_of_any_other_form_is_refused(text):
    raw = msgspec.msgpack.encode(text)

    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=TraceParent)


def test_a_traceparent_of_the_right_form_is_read():
    raw = msgspec.msgpack.encode(GOOD)

    assert msgspec.msgpack.decode(raw, type=TraceParent) == GOOD


def test_a_call_with_another_form_is_a_bad_message():
    call = Call("f", Body(b"", [], [], []), None, True, False, 1.0, traceparent="or 1=1")

    with pytest.raises(BadMessage, match=r"traceparent|regex|length"):
        Kinds([Call]).decode(kind_of(Call), encode(call))
