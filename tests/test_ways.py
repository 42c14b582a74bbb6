"""The tables "the way of one call" and "the way of one backward" list the files that are passed.

A warm call and its backward between two workers of one process are recorded several times, by a
profile function on all of their threads. Which thread reads an answer is a matter of timing, so a
file that only some rounds pass may be in the table or not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import FrameType

import pytest
import torch

import gradwire
import gradwire.testing

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gradwire"
WARM_UP, ROUNDS = 3, 6
BACKGROUND = re.compile(r"gradwire \S+ (timer|keep|watchdog|refs|accept)")
"""threads whose work belongs to no call"""

Passed = set[tuple[str, str]]
"""file and function"""

PART_OF = {
    "autograd/scope.py": "current.py",
}
"""files that the tables count as a part of another"""
CALL_FILES = 26
"""files that a call may pass on both workers together; the aim is 25"""
PASS_FILES = 13
"""files that a backward may pass beside those of the call"""


class Recorder:
    """Notes which functions of gradwire are called while it is on, by any thread."""

    def __init__(self) -> None:
        self._passed: Passed | None = None

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """For `sys.setprofile`."""
        passed, code = self._passed, frame.f_code
        if passed is None or event != "call" or not code.co_filename.startswith(str(SOURCE)):
            return
        thread = threading.current_thread().name
        file = str(Path(code.co_filename).relative_to(SOURCE))
        if not file.startswith("testing/") and not BACKGROUND.match(thread):
            passed.add((PART_OF.get(file, file), code.co_qualname))

    @contextmanager
    def on(self) -> Iterator[Passed]:
        """What is called inside the block."""
        self._passed = passed = set()
        try:
            yield passed
        finally:
            self._passed = None


def recorded() -> tuple[list[Passed], list[Passed]]:
    """What each round of a call, and of its backward, has passed."""
    recorder = Recorder()
    calls: list[Passed] = []
    passes: list[Passed] = []

    def work() -> None:
        losses = []  # kept: their release would be recorded with the next call
        for _ in range(WARM_UP + ROUNDS):
            call, backward, loss = one_round(recorder)
            calls.append(call)
            passes.append(backward)
            losses.append(loss)

    with profiled(recorder.note), gradwire.testing.cluster(2) as workers:
        workers[0].run(work)
    return calls[WARM_UP:], passes[WARM_UP:]


def one_round(recorder: Recorder) -> tuple[Passed, Passed, torch.Tensor]:
    x = torch.ones(3, requires_grad=True)
    with recorder.on() as call:
        y = gradwire.rpc_sync("w1", torch.sin, args=(x,))
    loss = y.sum()
    with recorder.on() as backward:
        loss.backward()
    return call, backward, loss


@contextmanager
def profiled(note: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """This thread, and all that start inside the block."""
    before, before_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(before_threads)


def rows(page: str, title: str) -> list[list[str]]:
    """The cells of the table under a title."""
    text = (ROOT / "docs" / "concepts" / page).read_text().partition(f"## {title}\n")[2]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]


def quoted(table: list[list[str]], column: int) -> set[str]:
    return {word for row in table for word in re.findall(r"`([^`]+)`", row[column])}


def files(passed: Passed) -> set[str]:
    return {file for file, _ in passed}


@pytest.fixture(scope="module")
def ways() -> list[list[Passed]]:
    """Recorded in a process of its own: threads and garbage of other tests are recorded too."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_ways"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    return [[{tuple(each) for each in passed} for passed in way] for way in json.loads(done.stdout)]


WAYS = [(0, "calls.md", "The way of one call"), (1, "backward.md", "The way of one backward")]


@pytest.mark.parametrize(("way", "page", "title"), WAYS, ids=["call", "backward"])
def test_the_table_lists_the_files_that_are_passed(ways, way, page, title):
    rounds = [files(passed) for passed in ways[way]]
    table = quoted(rows(page, title), 1)

    missing = reduce(set.intersection, rounds) - table
    too_many = table - set.union(*rounds)

    assert (sorted(missing), sorted(too_many)) == ([], []), f"(missing, too many) in {page}"


@pytest.mark.parametrize(("way", "page", "title"), WAYS, ids=["call", "backward"])
def test_the_functions_of_the_table_are_called_in_the_files_of_their_row(ways, way, page, title):
    passed = set.union(*ways[way])

    wrong = []
    for row in rows(page, title):
        called = {name for file, name in passed if f"`{file}`" in row[1]}
        ends = tuple(f".{name}" for name in called)
        for either in re.findall(r"`[^`]+`(?: or `[^`]+`)*", row[2]):  # by which thread is free
            names = quoted([[either]], 0)
            if not any(end.endswith(f".{name}") for name in names for end in ends):
                wrong.append(either)

    assert sorted(wrong) == [], f"not called, in {page}"


def test_the_ways_are_short(ways):
    calls, passes = [[files(passed) for passed in rounds] for rounds in ways]
    call = reduce(set.intersection, calls)
    more = reduce(set.intersection, passes) - set.union(*calls)

    print(f"call: {len(call)} files; backward: {len(more)} more")
    assert len(call) <= CALL_FILES
    assert len(more) <= PASS_FILES


if __name__ == "__main__":
    print(json.dumps([[sorted(passed) for passed in way] for way in recorded()]))
