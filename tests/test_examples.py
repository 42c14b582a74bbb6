"""Every example runs, and so does the demo: each asserts what it prints."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


pytestmark = pytest.mark.usefixtures("no_secret")


def printed_by(script: Path, **environment: str) -> str:
    """What a script prints, given that it ends well and says nothing on stderr."""
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(example):
    assert printed_by(example).strip()


@pytest.mark.slow
@pytest.mark.processes
def test_the_demo_is_plain_text_without_a_terminal_and_fits_a_narrow_one():
    printed = printed_by(ROOT / "examples" / "demo.py", COLUMNS="40")

    assert "\x1b" not in printed
    assert "\r" not in printed
    assert printed.isascii()
    assert max(len(line) for line in printed.splitlines()) <= 40
    assert "Largest difference of any gradient:" in printed


class Terminal(io.StringIO):
    """A stdout that is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def demo(monkeypatch):
    """The demo as a module, to be seen in 40 columns."""
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(threads)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    return module


def show_all_steps(demo) -> str:
    with redirect_stdout(Terminal()) as terminal, demo.progress() as show:
        for step in range(demo.STEPS):
            show(1 / (step + 1))
    return terminal.getvalue()


def test_the_bar_without_rich_is_drawn_over_itself(demo, monkeypatch):
    monkeypatch.setattr(demo, "rich_progress", None)

    _, *drawn = show_all_steps(demo).rstrip("\n").split("\r")

    assert len(drawn) == demo.STEPS
    assert {len(bar) for bar in drawn} == {39}
    assert drawn[0] == "[----------------]   1/300  loss 1.0000"
    assert drawn[-1] == "[################] 300/300  loss 0.0033"


@pytest.mark.skipif(not importlib.util.find_spec("rich"), reason="rich is not installed")
def test_the_bar_with_rich_says_the_same(demo):
    assert "300/300 loss 0.0033" in show_all_steps(demo)
