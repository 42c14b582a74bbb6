"""Three workers in processes of their own, and episodes of random hazards.

Nobody is killed or cut off, so nothing may fail: every gradient is exact, every wait ends by its
deadline, no worker is said to be lost or silent, every process ends, and nothing is left.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from gradwire.agent.peers.secret import write_secret
from tests.storm.hazards import KINDS

NAMES = ("w0", "w1", "w2")
LINKS = ("unix", "tcp://127.0.0.1:0")
PATIENCE = 60.0
"""Seconds until a command that should be over counts as never ending."""


MOST_REFUSED = 0.1
"""of the calls that finalizers and signal handlers make"""


class Violation(AssertionError):
    """A promise was broken."""


class Crewman:
    """One worker's process."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self._log = name, log
        self._answers, theirs = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.storm.far", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=(theirs,),
                env=environment,
            )
        os.close(theirs)
        self._heard = b""

    def begin(self, do: str, **details) -> None:
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Violation(f"{self.name} is gone: {self.log()}") from None

    def finish(self, seconds: float = PATIENCE):
        until = time.monotonic() + seconds
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            more = os.read(self._answers, 1 << 16) if ready else None
            if more is None:
                self.signal(signal.SIGQUIT)
                time.sleep(1)
                raise Violation(f"{self.name} has not answered in {seconds:g} s: {self.log()}")
            if not more:
                raise Violation(f"{self.name} has ended: {self.log()}")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        answer = json.loads(line)
        if "raised" in answer:
            raise Violation(f"{self.name} raised {answer['raised']}")
        return answer["said"]

    def do(self, do: str, **details):
        self.begin(do, **details)
        return self.finish()

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def ends(self, seconds: float) -> int:
        """Its exit status, once it is told that there is nothing more to do."""
        self._process.stdin.close()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGQUIT)
            time.sleep(1)
            raise Violation(f"the process of {self.name} does not end: {self.log()}") from None

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        os.close(self._answers)

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class Storm:
    """A world of three workers, and what they went through."""

    def __init__(self, seed: int, kinds=KINDS) -> None:
        self.random, self.kinds = random.Random(seed), tuple(kinds)
        self.done: Counter = Counter()
        self._stack = ExitStack()
        self._crew: list[Crewman] = []

    def __enter__(self) -> Storm:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-storm-"))
        self._stack.callback(self._kill)
        write_secret(Path(directory) / "secret")
        listen = self.random.choice(LINKS)
        self._crew = [Crewman(name, Path(directory) / f"{name}.log") for name in NAMES]
        for rank, man in enumerate(self._crew):
            man.begin("join", directory=directory, name=man.name, rank=rank, listen=listen)
        for man in self._crew:
            man.finish()
        self._warm_up()
        return self

    def _warm_up(self) -> None:
        """What is imported late, such as by the first backward: Python cannot import inside of it.

        With "threads" but none of the hazards that interrupt.
        """
        for man in self._crew:
            man.begin(
                "episode", seed=self.random.randrange(1 << 30), seconds=1.5, kinds=["threads"]
            )
        for man in self._crew:
            if wrong := man.finish()["wrong"]:
                raise Violation(f"{man.name} in its first rounds: {wrong}")

    def __exit__(self, *_) -> None:
        self._stack.close()

    def _kill(self) -> None:
        for man in self._crew:
            man.kill()

    def episode(self, seconds: float) -> list[str]:
        """One; the kinds of hazards that it had. Raises Violation if a promise was broken."""
        kinds = [kind for kind in self.kinds if self.random.random() < 0.6] or list(self.kinds)
        over = threading.Event()
        signals = threading.Thread(
            target=self._send_signals, args=(self.random.random(), over), daemon=True
        )
        for man in self._crew:
            man.begin("episode", seed=self.random.randrange(1 << 30), seconds=seconds, kinds=kinds)
        if "signals" in kinds:
            signals.start()
        try:
            said = [man.finish() for man in self._crew]
        finally:
            over.set()
            if "signals" in kinds:
                signals.join()
        wrong = []
        for man, one in zip(self._crew, said, strict=True):
            self.done += Counter(one["done"])
            wrong += [f"{man.name}: {what}" for what in one["wrong"]]
        if wrong:
            wrong += [f"--- {man.name}\n{man.log()}" for man in self._crew]
            raise Violation("\n".join([f"under {', '.join(kinds)}:", *wrong]))
        self._check_clean(kinds)
        self._check_refused()
        return kinds

    def _send_signals(self, seed: float, over: threading.Event) -> None:
        chance = random.Random(seed)
        while not over.wait(chance.uniform(0.001, 0.05)):
            chance.choice(self._crew).signal(signal.SIGUSR1)

    def _check_refused(self) -> None:
        made = sum(n for what, n in self.done.items() if what.startswith("calls of "))
        if self.done["refused"] > MOST_REFUSED * made + 20:
            raise Violation(f"{self.done['refused']} calls were refused, {made} were made")

    def _check_clean(self, kinds: list[str]) -> None:
        for man in self._crew:
            man.begin("leftovers")
        left = {man.name: man.finish() for man in self._crew}
        if any(left.values()):
            raise Violation(f"left behind after {', '.join(kinds)}: {left}")

    def end(self) -> None:
        """All leave and end, and nothing remains."""
        for man in self._crew:
            man.begin("leave")
        for man in self._crew:
            man.finish()
        for man in self._crew:
            if remains := man.do("remains"):
                raise Violation(f"{man.name} keeps {remains} after it has left")
            status = man.ends(30)
            if status:
                raise Violation(f"{man.name} ended with status {status}: {man.log()}")
