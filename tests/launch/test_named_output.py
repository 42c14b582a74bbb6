"""The names of workers before the lines that they print."""

from __future__ import annotations

import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest

from gradwire.errors import UsageError
from gradwire.launch import named_output as of
from gradwire.launch.named_output import NamedOutput, named_output, prefix_of, split_lines
from gradwire.options import Options


class Screen(io.StringIO):
    """A terminal, and what was written to it at once."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)

    def isatty(self):
        return True


@contextmanager
def on_screen():
    """A terminal as stdout, and a file as stderr. No fixture: pytest replaces both afterwards."""
    screen, errors = Screen(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen), redirect_stderr(errors):
        patch.setattr(of, "is_terminal_plain", lambda: True)
        yield screen, errors


def test_lines_end_at_newlines_only():
    assert split_lines("a\n\nb") == (["a", ""], "b")
    assert split_lines("a\rb") == ([], "a\rb")


def test_a_line_is_written_at_once_when_it_ends():
    with on_screen() as (screen, _):
        with named_output("w1", 1, "auto"):
            print("a", "b", end="", flush=True)
            before = list(screen.writes)
            print("c\nd\ne", end="")
            print("f")
        after = sys.stdout

    assert before == []
    assert screen.writes == ["[w1] a bc\n[w1] d\n", "[w1] ef\n"]
    assert after is screen


def test_what_has_no_end_is_written_in_the_end():
    def fail():
        sys.stdout.writelines(["x", "y"])
        raise ZeroDivisionError

    named = named_output("w1", 1, "auto")
    with on_screen() as (screen, _), pytest.raises(ZeroDivisionError), named:
        fail()

    assert screen.getvalue() == "[w1] xy\n"


def test_a_forked_process_does_not_write_the_line_of_the_other(monkeypatch):
    with on_screen() as (screen, _), named_output("w1", 1, "auto"):
        print("begun", end="")
        monkeypatch.setattr(os, "getpid", lambda: -1)

    assert screen.getvalue() == ""


def test_lines_of_threads_are_not_mixed():
    stream = Screen()
    out = NamedOutput(stream, "[w1] ")

    def speak(n):
        for _ in range(100):
            print(n, n, n, file=out)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(speak, range(8)))

    lines = stream.getvalue().splitlines()
    assert sorted(set(lines)) == [f"[w1] {n} {n} {n}" for n in range(8)]
    assert len(lines) == 800


def test_names_are_for_terminals_unless_the_options_say_otherwise():
    with on_screen() as (screen, errors):
        for output in ("auto", "named", "plain"):
            with named_output("w2", 2, output):
                print(output)
                print(output, file=sys.stderr)

    assert screen.getvalue() == "[w2] auto\n[w2] named\nplain\n"
    assert errors.getvalue() == "auto\n[w2] named\nplain\n"


def test_it_is_a_stream_like_the_other():
    with on_screen(), named_output("w1", 1, "named"):
        found = sys.stdout.isatty(), sys.stdout.closed, sys.stdout.write("abc\n")

    assert found == (True, False, 4)


def test_a_process_without_a_console_has_no_names(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with named_output("w1", 1, "named"):
        assert sys.stdout is None


def test_workers_have_colours_where_the_terminal_has():
    assert prefix_of("w1", 1, colour=False) == "[w1] "
    assert prefix_of("w1", 1, colour=True) == "\x1b[33m[w1]\x1b[0m "
    assert len({prefix_of("w", n, colour=True) for n in range(12)}) == 6


def test_another_output_is_refused():
    with pytest.raises(UsageError, match="output='bright' is unknown"):
        Options(output="bright")
