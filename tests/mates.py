"""Processes that are cheap to kill: forked from one that has imported torch, told what to do by a
pipe of their own, so that what a test says to them never mixes with what workers say.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass

PATIENCE = 40.0
_JOIN_SECONDS = 10.0


class Gone(Exception):
    """The process died while it was to do something, or before."""


class Hung(Exception):
    """It has not done what it was told; its stacks are on stderr."""


@dataclass(eq=False)
class Raised(Exception):
    """What it did raised this."""

    type_name: str
    text: str

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}"


def processes():
    """Where mates come from: a server that has imported what they need."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # a process with threads must not be forked
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


class Mate:
    """One process."""

    def __init__(self, name: str) -> None:
        self.name = name
        context = processes()
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    def __repr__(self) -> str:
        return f"<Mate {self.name}>"

    def begin(self, fn, *args) -> None:
        """Have it run a function, and do not wait."""
        try:
            self._line.send((fn, args))
        except OSError:
            raise Gone(self.name) from None

    def finish(self, seconds: float = PATIENCE):
        """What the function that it began returned, or raise what it raised."""
        try:
            if not self._line.poll(seconds):
                self.show_stacks()
                raise Hung(f"{self.name} did nothing for {seconds:g} s")
            is_error, value = self._line.recv()
        except (EOFError, OSError):
            raise Gone(self.name) from None
        if is_error:
            raise Raised(*value)
        return value

    def do(self, fn, *args, seconds: float = PATIENCE):
        """Have it run a function, and wait."""
        self.begin(fn, *args)
        return self.finish(seconds)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def died_by(self, sig: int, seconds: float) -> bool:
        """Whether it has died so, or does in this time."""
        self._process.join(seconds)
        return self._process.exitcode in (-sig, 255)  # 255: the server did not say

    def show_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.2)

    def end(self) -> None:
        """By force, if it is still there."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_JOIN_SECONDS)
        self._line.close()
        self._process.close()


def _serve(line) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), name="lifeline", daemon=True).start()
    while True:
        try:
            fn, args = line.recv()
        except EOFError:
            os._exit(0)
        try:
            said = (False, fn(*args))
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            said = (True, (type(error).__name__, str(error)))
        with suppress(OSError):
            line.send(said)
        del said


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)
