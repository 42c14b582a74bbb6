"""The section on metrics and spans of the guide is run, and names what there is."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import eventually

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk")

import prometheus_client
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "seeing.md").read_text()
SECTION = re.search(r"^## Metrics and spans\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]
METRICS, SPANS = re.findall(r"^```python\n(.*?)^```", SECTION, re.M | re.S)


def names_in(text: str) -> dict:
    names: dict = {}
    exec(text, names)
    return names


@pytest.fixture
def workers():
    with cluster(2) as made:
        yield made


def test_the_metrics_are_those_of_the_table_and_are_served(workers, monkeypatch):
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr("gradwire.seeing.metrics.REGISTRY", registry)
    started = []

    def start(port, host):
        started.append(prometheus_client.exposition.start_http_server(port, host, registry))
        return started[0]

    monkeypatch.setattr(prometheus_client, "start_http_server", start)

    port = workers[0].run(names_in(METRICS)["serve_metrics"], 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    ((server, thread),) = started
    server.shutdown()
    server.server_close()
    thread.join()

    said = set(re.findall(r"gradwire_\w+", "".join(re.findall(r"^\| (`.*?) \|", SECTION, re.M))))
    assert said == set(re.findall(r"^# TYPE (gradwire_\w+)", text, re.M))


def test_the_spans_are_those_that_the_page_names(workers):
    exporter, names = InMemorySpanExporter(), names_in(SPANS)
    provider = workers[0].run(names["make_spans"], exporter)
    workers[1].run(gw.otel.enable, provider)

    workers[0].run(names["step"], provider)

    expected = ["gradwire/backward", "gradwire/torch.sin", "gradwire/torch.sin", "step"]
    assert eventually(
        lambda: sorted(span.name for span in exporter.get_finished_spans()) == expected
    )
    provider.shutdown()
