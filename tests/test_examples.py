"""Every example runs, and so does the demo: each asserts what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))

pytestmark = [pytest.mark.slow, pytest.mark.processes]


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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(example):
    assert printed_by(example).strip()


def test_the_demo_is_plain_text_without_a_terminal_and_fits_a_narrow_one():
    printed = printed_by(ROOT / "examples" / "demo.py", COLUMNS="40")

    assert "\x1b" not in printed
    assert "\r" not in printed
    assert printed.isascii()
    assert max(len(line) for line in printed.splitlines()) <= 40
    assert "Largest difference of any gradient:" in printed
