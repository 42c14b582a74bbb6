"""Local Ray clusters, and programs that are their drivers, as users write them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SECONDS = 110


def pytest_collection_modifyitems(items):
    """No test here runs without Ray."""
    is_there = importlib.util.find_spec("ray") is not None
    for item in items:
        if HERE in item.path.parents and not is_there and item.get_closest_marker("needs_ray"):
            item.add_marker(pytest.mark.skip(reason="ray is not installed"))


class LocalRay:
    """A cluster of raylets on this machine, in a process of its own: see raylets.py."""

    def __init__(self, cpus: list[int]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray")  # short: for unix sockets
        self.path = Path(self._folder.name)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADWIRE_")}
        self.environment |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "RAY_TMPDIR": self._folder.name,
            "RAY_AUTH_MODE": "disabled",  # it would write a token into the home directory
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONWARNINGS": "ignore",  # of Ray's own
        }
        command = [sys.executable, "-m", "tests.ray.raylets", *map(str, cpus)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
        )
        self.environment["RAY_ADDRESS"] = self._said()

    def _said(self) -> str:
        for line in self._process.stdout:
            if line.startswith("said "):
                return line.removeprefix("said ").strip()
        raise AssertionError("the cluster did not start")

    def ask(self, what: str) -> str:
        """Have something done by raylets.py."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._said()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
        self._folder.cleanup()

    def start(self, program: str) -> subprocess.Popen:
        """Start a driver with this text."""
        file = self.path / "program.py"
        file.write_text(textwrap.dedent(program))
        return subprocess.Popen(
            [sys.executable, str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def run(self, program: str) -> str:
        """Run a driver to its end; returns what it printed."""
        started = self.start(program)
        try:
            out, _ = started.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)
            print(started.communicate()[0])
            raise
        print(out)
        return out


@pytest.fixture(scope="module")
def one_node():
    cluster = LocalRay([4])
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def three_nodes():
    """The driver's has no CPU, so workers are on the two others."""
    cluster = LocalRay([0, 2, 2])
    yield cluster
    cluster.close()
