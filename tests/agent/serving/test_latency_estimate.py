"""What is short is known from how long it took."""

from __future__ import annotations

from gradwire.agent.serving.dispatch import LatencyEstimate


def test_what_was_never_seen_is_not_short():
    assert not LatencyEstimate().is_short("f")


def test_it_is_what_it_was_lately():
    latency = LatencyEstimate()
    latency.took("f", 0.0001)
    assert latency.is_short("f")

    latency.took("f", 0.1)
    assert not latency.is_short("f")

    for _ in range(20):
        latency.took("f", 0.0001)
    assert latency.is_short("f")
    assert not latency.is_short("g")


def test_names_do_not_add_up():
    latency = LatencyEstimate()
    for n in range(100_000):
        latency.took(f"f{n}", 0.0)

    assert len(latency._seconds) <= 4096
