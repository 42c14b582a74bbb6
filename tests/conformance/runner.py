"""Runs tests, a few at once: each in a process of its own, which forks the ranks.

The ranks of a test share a process group, so that one that hangs is ended as a whole. Nothing here
may start a thread: all processes are forked from this one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.conformance.plan import Case, cases
from tests.conformance.suites import build, load

_PATIENCE = 15.0
"""Seconds beyond the limit, in which the ranks' stacks are collected, before all are killed."""
_TASKS = Path("/proc/self/task")


class Verdict(StrEnum):
    """How a test ended."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test."""

    case: Case
    verdict: Verdict
    seconds: float
    error: str
    """the traceback of the test and of its ranks"""
    log: str
    """what its processes printed"""


@dataclass(frozen=True, slots=True)
class RunningTest:
    """A test under way."""

    case: Case
    process: int
    place: Path
    began: float


def run_all(waiting: list[Case], jobs: int, limit: int, *, gpu: bool = False) -> Iterator[Outcome]:
    """Each test's outcome, in the order in which they end."""
    if not gpu:
        _refuse_threads()
    todo, running = list(reversed(waiting)), []
    try:
        while todo or running:
            while todo and len(running) < jobs:
                running.append(_spawn(todo.pop()) if gpu else _start(todo.pop()))
            for test in list(running):
                outcome = _maybe_outcome(test, limit)
                if outcome is not None:
                    running.remove(test)
                    yield outcome
            time.sleep(0.02)
    finally:
        for test in running:
            _end(test)


def _refuse_threads() -> None:
    if _TASKS.exists() and len(list(_TASKS.iterdir())) > 1:
        raise RuntimeError("a thread was started before the tests are forked")


def _start(case: Case) -> RunningTest:
    place = Path(tempfile.mkdtemp(prefix="conformance-"))
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _be_a_test(case, place)
    return RunningTest(case, process, place, time.monotonic())


def _spawn(case: Case) -> RunningTest:
    """Like `_start`, in a process that imports torch anew: CUDA cannot be used after a fork."""
    place = Path(tempfile.mkdtemp(prefix="conformance-"))
    command = (sys.executable, "-m", "tests.conformance", "--be", str(case), str(place))
    process = os.posix_spawn(sys.executable, command, os.environ)
    return RunningTest(case, process, place, time.monotonic())


def be(name: str, place: Path) -> None:
    """The process that `_spawn` starts."""
    (case,) = cases(tests=[name], gpu=True)
    load(stock=False)
    _be_a_test(case, place)


def _be_a_test(case: Case, place: Path) -> None:
    """The process of a test: run it, write down what happened, and end."""
    code = 1
    try:
        os.setpgid(0, 0)
        tempfile.tempdir = str(place)
        log = os.open(place / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = unittest.TestResult()
        build(case.suite)(case.test).run(result)
        (place / "result").write_text(json.dumps(_told(result)), encoding="utf-8")
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _told(result: unittest.TestResult) -> dict[str, str]:
    errors = [text for _, text in result.errors + result.failures]
    if errors or not result.testsRun:
        return {"verdict": Verdict.FAIL, "error": "\n".join(errors) or "no such test was run"}
    if result.skipped:
        return {"verdict": Verdict.SKIP, "error": result.skipped[0][1]}
    return {"verdict": Verdict.PASS, "error": ""}


def _maybe_outcome(test: RunningTest, limit: int) -> Outcome | None:
    """The outcome, once the test has ended or has had its time."""
    seconds = time.monotonic() - test.began
    ended, _ = os.waitpid(test.process, os.WNOHANG)
    if not ended and seconds < limit + _PATIENCE:
        return None
    _end(test, reaped=bool(ended))
    log = _text(test.place / "log")
    told = json.loads(_text(test.place / "result") or "{}")
    verdict = Verdict(told.get("verdict", Verdict.FAIL))
    if not ended or (verdict is Verdict.FAIL and seconds >= limit):
        verdict = Verdict.TIMEOUT
    shutil.rmtree(test.place, ignore_errors=True)
    return Outcome(test.case, verdict, seconds, told.get("error", log), log)


def _end(test: RunningTest, reaped: bool = False) -> None:
    """Whatever is left of it."""
    for kill, target in ((os.killpg, test.process), (os.kill, test.process)):
        try:
            if kill is os.killpg or not reaped:
                kill(target, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if not reaped:
        os.waitpid(test.process, 0)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
