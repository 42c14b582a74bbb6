"""A seeded minute of hostile bytes for each run of the tests, and what Hypothesis thinks of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strength
from tests.fuzz.__main__ import NAMES
from tests.fuzz.mutate import Mutator
from tests.fuzz.run import MOST_GROWTH, campaign
from tests.fuzz.targets import TARGETS, Defect

EXECUTIONS = {
    "frame": 80_000,
    "handshake": 250_000,
    "message": 350_000,
    "payload": 280_000,
    "tensors": 60_000,
    "world": 7_000,
}


def test_no_target_is_left_out():
    """Neither by these tests, nor by the command, nor by `make fuzz`."""
    (loop,) = re.findall(
        r"for target in (.*); do", (Path(__file__).parents[2] / "Makefile").read_text()
    )

    assert {"frame", "message", "payload", "handshake"} <= set(TARGETS)
    assert sorted(TARGETS) == sorted(EXECUTIONS) == sorted(NAMES) == sorted(loop.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_give_a_value_or_a_typed_error(name):
    executions = strength.count(EXECUTIONS[name], EXECUTIONS[name] // 5)
    report = campaign(name, strength.seeds(1, 1).start, executions=executions)
    assert report.executions == executions
    assert report.grown < MOST_GROWTH


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_what_correct_peers_send_is_taken(name):
    """The seeds are what they should be: else the mutants of them would be noise."""
    target = TARGETS[name]
    seeds = target.seeds()
    assert len(seeds) > 3
    with target.open() as run:
        for data in seeds:
            run(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_read_as_frames_or_refused(data):
    with TARGETS["frame"].open() as run:
        run(b"\0" + data)
        run(b"\1" + data)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 255), st.binary(max_size=300))
def test_any_bytes_are_read_as_messages_or_refused(kind, data):
    with TARGETS["message"].open() as run:
        run(bytes([kind]) + data)


def test_a_mutator_repeats_itself():
    seeds = TARGETS["payload"].seeds()
    first, second, other = Mutator(1, seeds), Mutator(1, seeds), Mutator(2, seeds)
    made = [first.next() for _ in range(200)]
    assert made == [second.next() for _ in range(200)]
    assert made != [other.next() for _ in range(200)]
    assert len(set(made)) > 150


def test_a_defect_shows_the_input_that_found_it(monkeypatch):
    from contextlib import contextmanager

    @contextmanager
    def broken():
        def run(data):
            if len(data) > 3:
                raise Defect("something else")

        yield run

    target = TARGETS["payload"]._replace(open=broken)
    monkeypatch.setitem(TARGETS, "payload", target)
    with pytest.raises(Defect, match="something else") as found:
        campaign("payload", 1, executions=100)
    assert "target payload, input b" in found.value.__notes__[0]
