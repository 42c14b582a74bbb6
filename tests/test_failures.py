"""The guide to failures: each of its programs prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "failures.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)
PROLOGUE = BLOCKS[0][1]
PROGRAMS = {
    re.findall(r"^## (.*)$", TEXT[: TEXT.index(said)], re.M)[-1]: (program, said)
    for (language, program), (after, said) in pairwise(BLOCKS)
    if (language, after) == ("python", "text")
}
NUMBERS = re.compile(
    r"(?<=w0#)\d+|(?<=s0\.)\d+|(?<=within 0\.)\d+"
    r"|(?<=gradwire-run-)\w+/w\d\.socket( \(process \d+\))?|(?<=127\.0\.0\.1:)\d+"
    r"|[\d.e-]+(?= s after)"
)
"""of calls, of steps and of hundredths of a second, and who of two has dialled: which they are
hangs on the order of things"""
EPILOGUE = """
if __name__ == "__main__":
    os.environ["GRADWIRE_FAULTS"] = globals().get("faults", "")
    options = gradwire.Options(timeouts=gradwire.Timeouts(shutdown=2))
    gradwire.run(main, world_size=3, options=options)
"""


def test_every_text_has_a_program():
    assert len(PROGRAMS) == sum(language == "text" for language, _ in BLOCKS) >= 6


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("title", PROGRAMS)
def test_a_program_of_the_guide_to_failures_prints_what_it_says(title, tmp_path):
    program, said = PROGRAMS[title]

    printed, complaints = output(program, tmp_path)

    assert [NUMBERS.sub("#", line) for line in printed] == [
        NUMBERS.sub("#", line) for line in said.splitlines()
    ], complaints


def output(program, directory):
    """What it prints, and what it says besides."""
    place = directory / "program.py"
    place.write_text(PROLOGUE + program + EPILOGUE)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADWIRE_")}
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in places if p)

    done = subprocess.run(
        [sys.executable, str(place)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout.splitlines(), done.stderr


def write_anew():
    """Put into the page what its programs print now: python -m tests.test_failures"""
    text = TEXT
    for program, said in PROGRAMS.values():
        with tempfile.TemporaryDirectory() as directory:
            printed, _ = output(program, Path(directory))
        text = text.replace(f"```text\n{said}", "```text\n" + "".join(f"{p}\n" for p in printed))
    PAGE.write_text(text)


if __name__ == "__main__":
    write_anew()
