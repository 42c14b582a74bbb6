"""Every benchmark runs, with the smallest parameters; how long anything takes is not asserted."""

from __future__ import annotations

import math
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import measure, trace
from benchmarks.__main__ import QUESTIONS, ask, make_run
from benchmarks.api import GRADWIRE, SIDES, TORCH
from benchmarks.bare import BARE
from benchmarks.measure import Run, Summary, row
from benchmarks.report import facts, load, save, spoken, table
from benchmarks.sides import BlockFailed, World
from tests import strength

ALONE = {
    "two_trainers": {GRADWIRE},
    "protected": {GRADWIRE},
    "tracing": {GRADWIRE},
    "bare": {BARE},
}
"""Whose numbers they are, if not of both sides."""
ALONE_IN_A_ROW = {"killed, until it serves again": {GRADWIRE}}  # the other cannot do it
WORKERS = 2
"""As many as any question needs in a tiny run."""


@pytest.fixture(scope="module")
def run():
    made = make_run(rounds=1)
    made.tiny, made.seconds = True, 0.0
    made.worlds(WORKERS)
    yield made
    made.close()


# -- the questions


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("question", strength.part_of(QUESTIONS, 3))
def test_a_question_has_rows_of_both_sides(question, run):
    rows = list(ask(question, run))

    assert rows
    for found in rows:
        assert found.question == question
        sides = ALONE_IN_A_ROW.get(found.measure) or ALONE.get(question, set(SIDES))
        assert set(found.sides) == sides
        for summary in found.sides.values():
            assert summary.count >= 1
            assert math.isfinite(summary.median)
            assert summary.low <= summary.median <= summary.high
            assert summary.median > 0 or found.unit != "s"


def test_a_trace_shows_every_micro_batch_at_every_stage(capsys):
    trace.main()

    *rows, _ = capsys.readouterr().out.splitlines()
    stages = [line for line in rows if line.startswith("w")]
    assert len(stages) == 2 * trace.STAGES
    for line in stages:
        assert set(line.split()[2]) - {"."} == set("01234567")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_a_file_with_a_question(question):
    text = (Path(measure.__file__).parent / f"{question}.py").read_text()

    assert "?" in text.split('"""')[1] or question == "two_trainers"
    assert f'main(["--only", "{question}", *sys.argv[1:]])' in text


def test_every_file_is_a_question_or_serves_them_or_draws():
    files = {path.stem for path in Path(measure.__file__).parent.glob("*.py")}

    serving = {"__init__", "__main__", "api", "measure", "peers", "report", "sides"}
    assert files == serving | {"chart", "trace"} | set(QUESTIONS)


# -- worlds


def fail() -> None:
    raise ValueError("as it should")


@pytest.mark.slow
@pytest.mark.processes
def test_a_block_that_raises_says_where_and_the_world_goes_on(run):
    world = run.worlds(WORKERS)[1]

    with pytest.raises(BlockFailed, match=r"(?s)w0 of gradwire raised.*ValueError: as it should"):
        world.run(fail)

    assert world.run(abs, -1) == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_dies_is_named():
    with World(GRADWIRE, 1) as world, pytest.raises(BlockFailed, match="w0 of gradwire died"):
        world.run(os._exit, 3)


# -- what is said of them


def example(torch: float, gradwire: float, **more) -> measure.Row:
    samples = {TORCH: [[torch] * 3, [2 * torch]], GRADWIRE: [[gradwire]]}
    return row("noop", "no-op", samples, **more)


def test_a_ratio_above_one_says_that_gradwire_is_better():
    assert example(2.0, 1.0).ratio == 2.0
    assert example(2.0, 1.0, unit="calls/s", more_is_better=True).ratio == 0.5
    assert row("noop", "no-op", {GRADWIRE: [[1.0]]}).ratio is None


def test_a_summary_is_of_all_samples_and_keeps_the_rounds():
    found = measure.summary_of([[1.0, 2.0, 3.0], [4.0, 5.0]])

    assert found == Summary(median=3.0, low=1.4, high=4.6, count=5, rounds=[2.0, 4.5])


@pytest.mark.parametrize(
    ("median", "unit", "said"),
    [
        (2.5, "s", "2.5 s [2.5 2.5]"),
        (0.0125, "s", "12.5 ms [12.5 12.5]"),
        (0.0000314, "s", "31.4 µs [31.4 31.4]"),
        (12345.6, "calls/s", "12 346 calls/s [12 346 12 346]"),
    ],
)
def test_a_number_is_said_in_a_unit_of_its_size(median, unit, said):
    assert spoken(Summary(median, median, median, 1, []), unit) == said


def test_the_table_names_the_command_the_versions_and_the_machine():
    known = facts(Run(), ["--only", "noop"])

    printed = table([example(0.002, 0.001, note="a note")], known)

    assert "python -m benchmarks --only noop" in printed
    assert "torch 2" in printed
    assert "cores" in printed
    assert "noop: no-op *" in printed
    assert re.search(r"2 ms \[2 3\.4\] +1 ms \[1 1\] +2\.00", printed)
    assert "a note" in printed


def test_what_is_stored_is_read_again(tmp_path):
    rows, known = [example(0.002, 0.001)], facts(Run(), [])
    save(tmp_path / "results" / "now.json", rows, known)

    assert load(tmp_path / "results" / "now.json") == (rows, known)


@pytest.mark.slow
def test_the_chart_has_a_mark_for_every_row(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import chart

    rows = [example(0.002, 0.001), example(0.001, 0.002)]
    drawn = chart.draw(rows, facts(Run(), []), tmp_path / "chart")

    assert [path.suffix for path in drawn] == [".svg", ".png"]
    assert all(path.stat().st_size > 1000 for path in drawn)
    ElementTree.parse(drawn[0])
