"""Forked children of a worker: each must end in time, and none may disturb its parent."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress

import gradwire
from tests.storm.notes import NOTES

SECONDS = 15.0
DEEDS = ("exit", "shutdown", "shutdown and exit", "collect", "nothing")
_original = os.getpid()
_children: deque[tuple[int, str, float]] = deque()


def is_original() -> bool:
    return os.getpid() == _original


def fork(chance: random.Random) -> None:
    """Make a child that does one of these deeds; return in the parent alone."""
    deed = chance.choice(DEEDS)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and "exit" in deed:
        deed = "shutdown"
    pid = os.fork()
    if pid:
        _children.append((pid, deed, time.monotonic() + SECONDS))
        NOTES.done(f"forks to {deed}")
        return
    if "shutdown" in deed:
        with suppress(Exception):
            gradwire.shutdown()
    if deed == "collect":
        gc.collect()
    if "exit" in deed:
        sys.exit(0)  # through whatever this thread was doing
    os._exit(0)


def reap(*, wait: bool) -> None:
    """Note which children have ended, and which should have."""
    for _ in range(len(_children)):
        try:
            child = _children.popleft()
        except IndexError:  # another thread looks too
            return
        if not _is_over(child, wait):
            _children.append(child)


def _is_over(child: tuple[int, str, float], wait: bool) -> bool:
    pid, deed, deadline = child
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code:
                NOTES.wrong(f"a forked child that was to {deed} ended with {code}")
            return True
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGQUIT)  # its stacks
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            NOTES.wrong(f"a forked child that was to {deed} had not ended after {SECONDS:g} s")
            return True
        if not wait:
            return False
        time.sleep(0.01)
