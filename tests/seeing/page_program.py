"""A program whose workers wait, and whose page a test looks at: it ends once a file is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import gradwire

SECONDS = 100.0


def hold(path):
    """Run until the file is there."""
    until = time.monotonic() + SECONDS
    while not Path(path).exists():
        assert time.monotonic() < until
        time.sleep(0.005)


def pass_on(worker, path):
    """Wait for another worker that holds."""
    gradwire.rpc_sync(worker, hold, args=(path,), timeout=SECONDS)


def main(path):
    gradwire.rpc_sync("w1", pass_on, args=("w2", path), timeout=SECONDS)


if __name__ == "__main__":
    gradwire.run(main, 3, args=(sys.argv[1],), page=True)
