"""Metrics and spans of workers in processes of their own."""

from __future__ import annotations

import urllib.request

import pytest
import torch

import gradwire as gw
from tests.leftovers import eventually

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MEBIBYTE = torch.zeros(1 << 18)
EXPORTER = InMemorySpanExporter()


def make_spans() -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    gw.otel.enable(provider)
    return provider


def enable() -> None:
    make_spans()


def spans(count: int) -> list[tuple[str, str, int, int]]:
    """The name, kind, span and parent of each that has ended here, once there are so many."""
    assert eventually(lambda: len(EXPORTER.get_finished_spans()) >= count)
    return [
        (each.name, each.kind.name, each.context.span_id, each.parent.span_id if each.parent else 0)
        for each in EXPORTER.get_finished_spans()
    ]


def traced() -> tuple[list, list]:
    tracer = make_spans().get_tracer("test")
    gw.rpc_sync("w1", enable)
    with tracer.start_as_current_span("program"):
        gw.rpc_sync("w1", torch.neg, args=(MEBIBYTE,))
    return spans(2), gw.rpc_sync("w1", spans, args=(1,))


def test_a_span_goes_on_in_another_process():
    here, there = gw.run(traced, 2, expose=[enable, spans])

    mine = {name: (kind, span, parent) for name, kind, span, parent in here}
    _, program, _ = mine["program"]
    kind, call, parent = mine["gradwire/torch.neg"]
    assert (kind, parent) == ("CLIENT", program)
    ((name, kind, _, parent),) = there
    assert (name, kind, parent) == ("gradwire/torch.neg", "SERVER", call)


def scrape() -> dict[str, float]:
    """The metrics of this worker as they come over HTTP."""
    registry = CollectorRegistry()
    gw.metrics.register(registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        text = answer.read().decode()
    server.shutdown()
    server.server_close()
    thread.join()
    return {
        f"{sample.name} {sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped() -> tuple[dict, dict]:
    gw.rpc_sync("w1", scrape)  # the first messages tell that blocks can be used
    gw.rpc_sync("w1", torch.neg, args=(MEBIBYTE,))
    with pytest.raises(gw.NotExposed):
        gw.rpc_sync("w1", eventually)
    return scrape(), gw.rpc_sync("w1", scrape)


def test_metrics_are_scraped_from_each_process():
    here, there = gw.run(scraped, 2, expose=[scrape])

    assert here["gradwire_sent_bytes_total ['shm', 'w0', 'w1']"] == MEBIBYTE.nbytes
    assert here["gradwire_received_bytes_total ['shm', 'w0', 'w1']"] == MEBIBYTE.nbytes
    assert there["gradwire_received_bytes_total ['shm', 'w0', 'w1']"] == MEBIBYTE.nbytes
    assert there["gradwire_refused_total ['not exposed', 'w1']"] == 1
    assert here["gradwire_calls_total ['out', 'raised', 'w0', 'w1']"] == 1
    assert there["gradwire_calls_total ['in', 'raised', 'w0', 'w1']"] == 1
    # Sent by one before the other was asked, so received by it.
    sent = here["gradwire_sent_bytes_total ['unix', 'w0', 'w1']"]
    assert 200 < sent < there["gradwire_received_bytes_total ['unix', 'w0', 'w1']"]
    assert there["gradwire_shared_blocks_bytes ['w1']"] >= MEBIBYTE.nbytes
