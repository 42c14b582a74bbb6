"""The tests with processes and deadlines, again and again: python -m tests.repeat --times 20

Each round is a run of pytest of its own, and the rounds run side by side, so that the machine is
busy. What fails is printed at once, and counted at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from queue import Empty, SimpleQueue

from tests.progress import Progress

TESTS = [
    "tests/processes",
    "tests/faults",
    "tests/test_failures.py",
    "tests/mayhem",
    "tests/storm",
    "tests/kills",
    "tests/soak",
]


class Rounds:
    """Runs them, and counts which tests failed."""

    def __init__(self, times: int, tests: list[str]) -> None:
        self._tests = tests
        self._numbers: SimpleQueue[int] = SimpleQueue()
        self._lock = threading.Lock()
        self._progress = Progress(times, "rounds", failed="failed")
        self.failed: Counter = Counter()
        for number in range(1, times + 1):
            self._numbers.put(number)

    def run(self, jobs: int) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(jobs)]
        with self._progress:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while True:
            try:
                number = self._numbers.get_nowait()
            except Empty:
                return
            self._round(number)

    def _round(self, number: int) -> None:
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self._tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        with self._lock:
            if done.returncode:
                self.failed.update(found or [f"pytest itself: status {done.returncode}"])
                self._progress.say(f"{done.stdout[-20_000:]}\n{done.stderr[-2000:]}")
            last = done.stdout.strip().rpartition("\n")[2]
            self._progress.say(f"round {number}, {time.monotonic() - began:.0f} s: {last}")
            self._progress.advance(failed=bool(done.returncode))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repeat")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4))
    parser.add_argument("tests", nargs="*", default=TESTS)
    asked = parser.parse_args()
    rounds = Rounds(asked.times, asked.tests)
    rounds.run(asked.jobs)
    for test, times in rounds.failed.most_common():
        print(f"failed {times} of {asked.times} times: {test}")
    if not rounds.failed:
        print(f"none failed in {asked.times} rounds")
    return 1 if rounds.failed else 0


if __name__ == "__main__":
    sys.exit(main())
