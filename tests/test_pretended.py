"""The tests with pretended devices, in a process that knows such devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_all_of_them_pass():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/pretended"]
    environment = {**os.environ, "GRADWIRE_PRETENDED": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
