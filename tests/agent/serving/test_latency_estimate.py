"""What is short is known from how long it took."""

from __future__ import annotations

from gradwire.agent.serving.dispatch import LatencyEstimate


def test_what_was_never_seen_is_not_short():
    assert not LatencyEstimate().is_short("f")


def test_it_is_what_it_was_lately():
    pace = LatencyEstimate()
    pace.took("f", 0.0001)
    assert pace.is_short("f")

    pace.took("f", 0.1)
    assert not pace.is_short("f")

    for _ in range(20):
        pace.took("f", 0.0001)
    assert pace.is_short("f")
    assert not pace.is_short("g")


def test_names_do_not_add_up():
    pace = LatencyEstimate()
    for n in range(100_000):
        pace.took(f"f{n}", 0.0)

    assert len(pace._seconds) <= 4096
