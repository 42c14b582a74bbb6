"""End, stop and continue processes of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

from gradwire.errors import DeadlinePassed

_FROZEN_SECONDS = 10.0


class _Process(Protocol):
    @property
    def pid(self) -> int | None: ...


def kill(process: _Process | int) -> None:
    """End it without a chance to say anything."""
    os.kill(_number(process), signal.SIGKILL)


def freeze(process: _Process | int) -> None:
    """Stop all of its threads where they are; when this returns they are stopped."""
    pid = _number(process)
    os.kill(pid, signal.SIGSTOP)
    until = monotonic() + _FROZEN_SECONDS
    while state(pid) not in "TZX":
        if monotonic() > until:
            raise DeadlinePassed(f"process {pid} did not stop in {_FROZEN_SECONDS:g} s")
        sleep(0.001)


def thaw(process: _Process | int) -> None:
    """Let it go on."""
    os.kill(_number(process), signal.SIGCONT)


@contextmanager
def frozen(process: _Process | int) -> Iterator[None]:
    """Stopped inside the block."""
    freeze(process)
    try:
        yield
    finally:
        thaw(process)


def _number(process: _Process | int) -> int:
    pid = process if isinstance(process, int) else process.pid
    assert pid is not None, "it was not started"
    return pid


def state(pid: int) -> str:
    """The letter by which /proc names it, X if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "X"
    return stat.rpartition(")")[2].split()[0]
