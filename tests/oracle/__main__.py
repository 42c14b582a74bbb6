"""`python -m tests.oracle --programs 20000`: the long run, with its progress.

The programs run in processes of their own, `--jobs` at a time: one that hangs ends its process, and
another one goes on with the next program.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from gradwire import Options, Timeouts
from gradwire.rpc.behavior import Behavior
from tests.oracle import leaks
from tests.oracle.check import SECONDS, Checker, exposed, workers
from tests.oracle.programs import KINDS, features_of
from tests.oracle.state import DEVICE
from tests.oracle.unusual import LOST
from tests.process_cluster import process_cluster
from tests.progress import Progress

SHARE = 250
"""programs of one process"""
OPTIONS = Options(timeouts=Timeouts(call=20, backward=20))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--together", action="store_true", help="one edge for each message")
    parser.add_argument("--processes", action="store_true", help="workers in processes")
    parser.add_argument(
        "--stacks", type=float, default=0.0, help="print those of all threads after so many seconds"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="all, or of: " + ", ".join(KINDS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="a program may take")
    parser.add_argument("--device", default=DEVICE, help="where tensors are, such as cuda:0")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--share", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ["GRADWIRE_ORACLE_DEVICE"] = asked.device  # for the processes of the run
    asked.kinds = KINDS if asked.kinds == "all" else [k for k in asked.kinds.split(",") if k]
    if unknown := set(asked.kinds) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    return asked


@contextmanager
def running(asked: argparse.Namespace) -> Iterator[Checker]:
    """A cluster in this process or of processes, and what checks programs on it."""
    with ExitStack() as stack:
        if asked.processes:
            stack.enter_context(leaks.cheap_collections())
            hosts = stack.enter_context(process_cluster(6, expose=exposed(), options=OPTIONS))
            hosts[LOST].kill()
            on_w0 = _just_run
        else:
            behavior = Behavior(edge_per_message=asked.together)
            draws = "draws" in asked.kinds
            on_w0 = stack.enter_context(workers(OPTIONS, behavior, draws=draws))
        unseen, told = stack.enter_context(leaks.unseen()), asked.together
        yield Checker(on_w0, together=told, kinds=asked.kinds, seconds=asked.seconds, unseen=unseen)


def _just_run(function: Callable, *args: object) -> object:
    return function(*args)


def run_share(asked: argparse.Namespace) -> None:
    """Run some programs here, and print a line of JSON for each."""
    torch.set_num_threads(1)
    with running(asked) as checker:
        for seed in range(asked.first, asked.first + asked.programs):
            # Also if the process cannot even say so: a lock held while the collector runs.
            patience = asked.stacks or 2 * asked.seconds
            faulthandler.dump_traceback_later(patience, exit=not asked.stacks)
            failure, used = checker.failure(seed), checker.features
            checker.features = Counter()
            print(json.dumps({"seed": seed, "failure": failure, "features": used}), flush=True)
            if checker.hung:
                os._exit(3)
        faulthandler.cancel_dump_traceback_later()


class Long:
    """Hands out the seeds, and collects what is said of them."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._progress = Progress(asked.programs, "programs", failed="differ")
        self._shares: queue.SimpleQueue[range] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.features: Counter = Counter()
        self.failures: list[str] = []
        self.over = 0
        end = asked.first + asked.programs
        for first in range(asked.first, end, SHARE):
            self._shares.put(range(first, min(first + SHARE, end)))

    def run(self) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(self._asked.jobs)]
        with self._progress:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while True:
            try:
                seeds = self._shares.get_nowait()
            except queue.Empty:
                return
            while seeds:
                seeds = self._share(seeds)

    def _share(self, seeds: range) -> range:
        """Run a process for these; those that it has not come to."""
        command = [sys.executable, "-m", "tests.oracle", "--share"]
        command += ["--first", str(seeds.start), "--programs", str(len(seeds))]
        command += ["--kinds", ",".join(self._asked.kinds), "--seconds", str(self._asked.seconds)]
        command += ["--stacks", str(self._asked.stacks)]
        command += ["--together"] if self._asked.together else []
        command += ["--processes"] if self._asked.processes else []
        next_seed = seeds.start
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                said = json.loads(line)
                next_seed = said["seed"] + 1
                self._note(said["failure"], said["features"])
        if process.returncode and next_seed < seeds.stop and process.returncode != 3:
            self._note(f"seed {next_seed}: its process ended with {process.returncode}", {})
            next_seed += 1
        return range(next_seed, seeds.stop)

    def _note(self, failure: str | None, features: dict[str, int]) -> None:
        with self._lock:
            self.over += 1
            self.features += Counter(features)
            if failure is not None:
                self.failures.append(failure)
                self._progress.say(failure)
            self._progress.advance(failed=failure is not None)


def main() -> int:
    """Run the programs; the number that differed, at most 1."""
    asked = parsed()
    if asked.share:
        run_share(asked)
        return 0
    long = Long(asked)
    long.run()
    for feature in features_of(asked.kinds):
        print(f"{long.features[feature]:8d}  {feature}")
    print(f"{long.over - len(long.failures)} of {long.over} programs as in one process")
    return 1 if long.failures or long.over < asked.programs else 0


if __name__ == "__main__":
    sys.exit(main())
