"""The guide to security is followed to the letter, by a reader with one machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "guide" / "security.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)
SHIMS = {"python": "", "gradwire": " -m gradwire"}


def test_every_block_is_a_named_program_or_a_command():
    assert {language for language, _ in BLOCKS} == {"python", "sh"}
    named = [re.match(r"# (\w+\.py)\n", text) for language, text in BLOCKS if language == "python"]
    assert all(named)


@pytest.fixture
def directory(tmp_path):
    """Where the reader works: the programs of the guide, and the two commands it uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for language, text in BLOCKS:
        if language == "python":
            here = text.replace("trainer.example.org:29400", f"127.0.0.2:{port}")
            (tmp_path / text.split()[1]).write_text(here)
    (tmp_path / "bin").mkdir()
    for name, arguments in SHIMS.items():
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        shim.chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.processes
def test_the_guide_to_security_works_from_its_first_line_to_its_last(directory):
    commands = "set -e\n" + "".join(text for language, text in BLOCKS if language == "sh")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADWIRE_")}
    environment["PATH"] = f"{directory / 'bin'}:{environment['PATH']}"
    if "PYTHONPATH" in environment:  # which may be relative to where the tests run
        places = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in places)

    done = subprocess.run(
        ["bash", "-c", commands],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    gradient = "[0.5403023362159729, 0.5403023362159729, 0.5403023362159729]"
    printed = done.stdout.splitlines()
    assert printed[0] == f"laptop: {gradient}"
    assert f"trainer: {gradient}" in printed
    assert "job/workers/lab.pem  for lab alone, with its .key" in printed
    assert (directory / "safe" / "authority.key").exists()
