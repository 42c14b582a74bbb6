"""Programs that know torch.distributed.rpc only: the same numbers with torch's and with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import strength

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples" / "compat").glob("*.py"))
TODAY = strength.part_of(PROGRAMS, 2)
SECONDS = 110

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(2 * SECONDS + 20),
    pytest.mark.usefixtures("no_secret"),
]


def printed_by(*command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@cache
def printed_with_torch(program: Path) -> list[str]:
    return printed_by(str(program))


@pytest.mark.parametrize("program", TODAY, ids=lambda path: path.stem)
def test_a_program_prints_its_losses(program):
    assert all(" loss " in line for line in printed_with_torch(program))


@pytest.mark.parametrize("program", TODAY, ids=lambda path: path.stem)
def test_a_program_prints_the_same_losses_with_gradwire(program):
    assert printed_by("-m", "gradwire.compat", str(program)) == printed_with_torch(program)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_knows_torch_only(program):
    assert "gradwire" not in program.read_text(encoding="utf-8").split('"""', 2)[2]
