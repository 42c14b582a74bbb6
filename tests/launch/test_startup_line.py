"""The line that is shown while workers start."""

from __future__ import annotations

import io

import pytest

from gradwire.launch.startup_line import StartupLine, startup_text


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)


def lines_on(screen):
    return screen.getvalue().split("\r\x1b[K")[1:]


@pytest.mark.parametrize(
    ("started", "joined", "seconds", "text"),
    [
        (0, 0, 0.9, ""),
        (0, 0, 1.0, "0 of 3 workers have started"),
        (2, 1, 9.0, "2 of 3 workers have started"),
        (3, 2, 9.0, "2 of 3 workers have joined"),
        (3, 3, 9.0, ""),
    ],
)
def test_the_text_says_what_is_waited_for(started, joined, seconds, text):
    assert startup_text(started, joined, 3, seconds) == text


def test_the_line_is_drawn_when_it_changes_and_is_gone_at_the_end():
    screen, clock = Screen(), Clock()
    with StartupLine(2, screen, clock) as line:
        line.show()
        clock.now += 2
        line.show()
        line.show()
        line.started(1)
        line.show()
        line.started(0)
        line.joined(0)
        line.show()
        line.joined(1)
        line.show()

    counts = ["0 of 2 workers have started", "1 of 2 workers have started"]
    assert lines_on(screen) == [*counts, "1 of 2 workers have joined", ""]


def test_workers_that_start_at_once_leave_the_screen_alone():
    screen, clock = Screen(), Clock()
    with StartupLine(1, screen, clock) as line:
        line.show()
        line.started(0)
        line.joined(0)
        clock.now += 100
        line.show()

    assert screen.getvalue() == ""


def test_a_worker_that_is_restarted_later_does_not_bring_it_back():
    screen, clock = Screen(), Clock()
    with StartupLine(1, screen, clock) as line:
        line.joined(0)
        clock.now += 100
        line.started(0)
        line.show()

    assert screen.getvalue() == ""


def test_an_error_takes_it_away():
    screen, clock = Screen(), Clock()
    line = StartupLine(2, screen, clock)
    clock.now += 2
    line.show()
    line.__exit__(KeyError, KeyError(), None)

    assert lines_on(screen) == ["0 of 2 workers have started", ""]


@pytest.mark.parametrize("kind", ["a file", "a dumb terminal", "the log of a CI", "nothing"])
def test_without_a_terminal_there_is_no_line(kind, monkeypatch):
    stream = io.StringIO() if kind == "a file" else Screen()
    if kind == "a dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    if kind == "the log of a CI":
        monkeypatch.setenv("CI", "true")
    if kind == "nothing":
        monkeypatch.setattr("sys.stderr", None)
        stream = None
    clock = Clock()
    with StartupLine(2, stream, clock) as line:
        clock.now += 100
        line.show()

    assert stream is None or stream.getvalue() == ""
