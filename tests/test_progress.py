"""What long commands say of how far they are: a bar on a terminal, elsewhere plain lines."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.progress import (
    SAY_EVERY,
    SECONDS,
    Pace,
    Progress,
    bar_text,
    left_text,
    progress_text,
    rate_text,
    shows_bars,
)

ROOT = Path(__file__).parents[1]


class Screen(io.StringIO):
    """A terminal of 60 columns, as the environment says."""

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def person(monkeypatch):
    for name, value in {"COLUMNS": "60", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CI", raising=False)


# -- pure


def test_a_line_says_how_far_how_fast_how_long_and_what_failed():
    said = progress_text(120, 500, 1 / 24, unit="programs", failed="2 differ", note="seed 7")

    assert said == "120 of 500 programs, 24/s, 16 s left, 2 differ, seed 7"


def test_a_command_that_runs_for_a_time_has_no_rate():
    assert progress_text(60, 600, 1, unit=SECONDS) == "60 of 600 s, 9 min left"


def test_before_two_are_done_nothing_is_guessed():
    assert progress_text(1, 500, 0, unit="rounds") == "1 of 500 rounds"


def test_a_rate_is_in_words_that_fit():
    assert (rate_text(0.01), rate_text(2.5)) == ("100/s", "2.5 s each")


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (60, "60 s"), (120, "2 min"), (6000, "2 h"), (0, "0 s")]
)
def test_the_time_left_is_rounded_to_what_it_is_worth(seconds, text):
    assert left_text(seconds) == f"{text} left"


@given(st.integers(0, 200), st.integers(0, 100), st.text("x", max_size=120), st.integers(20, 200))
def test_a_bar_never_needs_a_second_line(done, total, text, columns):
    assert len(bar_text(done, total, text, columns)) < columns


def test_a_bar_is_as_full_as_the_work_is_done():
    assert bar_text(1, 4, "a", 25) == "[#####---------------] a"
    assert bar_text(4, 4, "a", 25) == f"[{'#' * 20}] a"
    assert bar_text(1, 4, "long" * 5, 25) == "long" * 5


def test_a_pace_is_due_once_in_its_time():
    pace = Pace(30, now=100)

    assert [now for now in range(100, 200, 10) if pace.is_due(now)] == [130, 160, 190]


@pytest.mark.parametrize(
    ("stream", "environment", "shown"),
    [
        (Screen(), {"TERM": "xterm"}, True),
        (Screen(), {"TERM": "dumb"}, False),
        (Screen(), {"TERM": "xterm", "CI": "true"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
    ids=["terminal", "dumb", "CI", "file"],
)
def test_bars_are_for_people(stream, environment, shown):
    assert shows_bars(stream, environment) == shown


# -- effects


@pytest.mark.usefixtures("person")
def test_on_a_terminal_a_bar_is_drawn_over_itself_and_is_gone_at_the_end(capsys):
    screen, clock = Screen(), Clock()
    with Progress(4, "rounds", failed="broken", stream=screen, clock=clock) as progress:
        for _ in range(3):
            clock.now += 2
            progress.advance(failed=1)
        progress.say("round 3: broken")
    first, second, third, nothing, again, end = screen.getvalue().split("\r\x1b[K")[1:]

    assert first.endswith("] 1 of 4 rounds, 1 broken")
    assert second.startswith("[#")
    assert second.endswith("] 2 of 4 rounds, 2.0 s each, 4 s left, 2 broken")
    assert third == again != nothing == end == ""
    assert capsys.readouterr().out == "round 3: broken\n"


@pytest.mark.usefixtures("person")
def test_elsewhere_there_are_plain_lines_now_and_then():
    stream, clock = io.StringIO(), Clock()
    with Progress(1000, "programs", failed="differ", stream=stream, clock=clock) as progress:
        clock.now += 9  # something starts
        for _ in range(65):
            clock.now += 1
            progress.advance()

    assert stream.getvalue().splitlines() == [
        "21 of 1000 programs, 1.0 s each, 16 min left, 0 differ",
        "51 of 1000 programs, 1.0 s each, 16 min left, 0 differ",
    ]


def test_a_command_of_a_given_time_counts_its_seconds():
    stream, clock = io.StringIO(), Clock()
    with Progress(600, SECONDS, failed="broken", stream=stream, clock=clock) as progress:
        progress.note("14 episodes")
        clock.now += SAY_EVERY
        progress.reach(failed=2)
        clock.now += 10_000
        progress.reach()

    assert stream.getvalue().splitlines() == [
        "30 of 600 s, 10 min left, 2 broken, 14 episodes",
        "600 of 600 s, 2 broken, 14 episodes",
    ]


@pytest.mark.slow
@pytest.mark.processes
def test_a_command_into_a_pipe_has_results_on_stdout_and_no_bar():
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulate", "--seed", "1", "--seeds", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stdout.startswith("2 seeds (safety), 0 with violations")
    assert "\x1b" not in done.stdout + done.stderr
