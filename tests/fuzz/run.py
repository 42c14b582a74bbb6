"""A campaign: one target, many inputs, and what came of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.fuzz.mutate import Mutator
from tests.fuzz.targets import TARGETS, Target

MOST_GROWTH = 64 << 20
MOST_SECONDS = 20.0
_WARM = 300


class Hang(AssertionError):
    """One input took longer than any may."""


class Growth(AssertionError):
    """Memory that did not come back."""


@dataclass
class Report:
    """What a campaign did."""

    target: str
    executions: int = 0
    grown: int = 0
    slowest: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.target}: {self.executions} executions, {self.grown >> 20} MiB grown, "
            f"slowest {self.slowest:.3f} s"
        )


def campaign(
    name: str, seed: int, *, executions: int | None = None, seconds: float | None = None
) -> Report:
    """Feed a target so many inputs, or for so long. An input that is a defect is in the error."""
    target = TARGETS[name]
    seeds = target.seeds()
    mutator, report = Mutator(seed, seeds), Report(name)
    until = None if seconds is None else time.monotonic() + seconds
    with target.open() as run:
        start = None
        while (executions is None or report.executions < executions) and (
            until is None or time.monotonic() < until
        ):
            data = seeds[report.executions] if report.executions < len(seeds) else mutator.next()
            report.slowest = max(report.slowest, feed(target, run, data))
            report.executions += 1
            if report.executions == _WARM:
                start = resident()
            if start is not None and report.executions % 256 == 0:
                report.grown = max(report.grown, resident() - start)
                if report.grown > MOST_GROWTH:
                    raise Growth(f"{report}, last input {data!r:.2000}")
    return report


def feed(target: Target, run, data: bytes) -> float:
    """One input; how many seconds it took."""
    began = time.monotonic()
    try:
        with _limited():
            run(data)
    except BaseException as error:
        error.add_note(f"target {target.name}, input {data!r}")
        raise
    return time.monotonic() - began


def resident() -> int:
    """Bytes of memory in use."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


@contextmanager
def _limited() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Hang(f"no end after {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
