"""Metrics, as Prometheus reads them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import gradwire as gw
from gradwire.testing import cluster
from tests.leftovers import eventually

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

HERE = sys.modules[__name__]


@pytest.fixture
def workers():
    with cluster(2, expose=[HERE]) as made:
        yield made


def fine(x=None):
    return x


def broken():
    raise ValueError("no")


def families(text):
    """The families in an exposition text, by name."""
    found = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in found]
    assert len(names) == len(set(names)), "a family is said twice"
    for family in found:
        assert f"# HELP {family.name}" in text.decode()
        assert f"# TYPE {family.name}" in text.decode()
    return {family.name: family for family in found}


def value(found, name, **labels):
    """The only sample of that name with these labels."""
    (sample,) = [
        sample
        for family in found.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sample.value


def train():
    x = torch.ones(3, requires_grad=True)
    gw.rpc_sync("w1", fine, args=(x,)).sum().backward()
    with pytest.raises(ValueError, match="no"):
        gw.rpc_sync("w1", broken)
    parameter = gw.remote("w1", torch.nn.Parameter, args=(torch.ones(2),))
    gw.DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1).step()


def test_a_registry_shows_what_the_workers_of_the_process_have_done(workers):
    registry = CollectorRegistry()
    for worker in workers:
        worker.run(gw.metrics.register, registry)
    workers[0].run(train)
    assert eventually(lambda: workers[0].worker.agent.in_flight == 0)  # the reference is released

    found = families(generate_latest(registry))

    w0 = {"worker": "w0"}
    made = {"direction": "out", "peer": "w1", **w0}
    answered = value(found, "gradwire_calls_total", outcome="answered", **made)
    assert answered >= 3
    assert value(found, "gradwire_calls_total", outcome="raised", **made) == 1
    served = {"direction": "in", "peer": "w0", "worker": "w1", "outcome": "answered"}
    assert value(found, "gradwire_calls_total", **served) == answered
    assert value(found, "gradwire_sent_bytes_total", peer="w1", way="memory", **w0) > 100
    assert value(found, "gradwire_received_bytes_total", peer="w0", worker="w1", way="memory") > 100
    assert value(found, "gradwire_passes_total", outcome="answered", **w0) == 1
    assert value(found, "gradwire_steps_total", outcome="answered", **w0) == 1
    assert value(found, "gradwire_steps_total", outcome="answered", worker="w1") == 0
    assert value(found, "gradwire_backward_seconds_count", **w0) == 1
    assert value(found, "gradwire_step_seconds_count", **w0) == 1
    assert value(found, "gradwire_in_flight", **w0) == 0
    assert value(found, "gradwire_peers", state="connected", **w0) == 1
    assert value(found, "gradwire_info", version=gw.__version__, life="0", **w0) == 1
    mine = {"function": f"{__name__}.fine", **w0}
    assert value(found, "gradwire_call_seconds_count", **mine) == 1
    assert value(found, "gradwire_call_seconds_bucket", le="+Inf", **mine) == 1
    assert 0 < value(found, "gradwire_call_seconds_sum", **mine) < 60


def test_the_names_are_those_of_the_guide(workers):
    names = families(gw.metrics.exposition(workers[0].worker))

    assert sorted(name.removeprefix("gradwire_") for name in names) == [
        *("backward_seconds", "call_seconds", "calls", "contexts", "in_flight", "info"),
        *("live_edges", "losses", "oldest_wait_seconds", "passes", "peers"),
        *("received_bytes", "references", "refused", "restarts", "sent_bytes"),
        *("serving", "shared_blocks_bytes", "step_seconds", "steps", "values"),
    ]


def test_labels_are_bounded(workers):
    bounded = {"worker", "direction", "peer", "outcome", "way", "why", "state", "function", "le"}
    workers[0].run(train)

    for family in families(gw.metrics.exposition(workers[0].worker)).values():
        for sample in family.samples:
            assert set(sample.labels) <= bounded | {"version", "life"}


def test_a_worker_that_nobody_registers_measures_no_durations(workers):
    workers[0].run(train)

    assert workers[0].worker.events.observer is None


def test_a_worker_is_shown_no_more_once_it_is_taken_out(workers):
    registry = CollectorRegistry()
    workers[0].run(gw.metrics.register, registry)
    assert b'worker="w0"' in generate_latest(registry)

    workers[0].run(gw.metrics.unregister, registry)

    assert b'worker="w0"' not in generate_latest(registry)


def test_a_worker_in_another_ones_place_is_shown_instead(workers):
    registry = CollectorRegistry()
    workers[1].run(gw.metrics.register, registry)

    workers.restart(1).run(gw.metrics.register, registry)

    found = families(generate_latest(registry))
    assert value(found, "gradwire_info", worker="w1", life="1") == 1
    assert value(found, "gradwire_restarts_total", worker="w1") == 1


def test_what_is_refused_is_counted_by_kind(workers):
    def program():
        with pytest.raises(gw.NotExposed):
            gw.rpc_sync("w1", eventually)

    workers[0].run(program)

    found = families(gw.metrics.exposition(workers[1].worker))
    assert value(found, "gradwire_refused_total", why="not exposed") == 1


@pytest.mark.slow
def test_without_the_library_the_error_says_how_to_get_it():
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import gradwire\n"
        "try: gradwire.metrics\n"
        "except gradwire.UsageError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert "pip install 'gradwire[metrics]'" in said.stdout
