"""Forked children of a worker: each must end in time, and none may disturb its parent."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
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


def check_original() -> None:
    """A forked child that comes here was to leave: somebody has dropped its SystemExit."""
    if not is_original():
        os.write(2, f"{os.getpid()} has not left\n".encode())
        os._exit(3)


def leave_if_it_hides_an_exit(error: BaseException | None) -> None:
    """A SystemExit inside of `Condition.wait` may become a RuntimeError: CPython's own."""
    while error is not None and not is_original():
        if isinstance(error, SystemExit):
            os._exit(0)
        error = error.__context__


def unraisable(what: object) -> None:
    """Python drops what a finalizer or the callback of a weak reference raises: leave all the same.

    What finalizers raise in a forked child is said, and dropped.
    """
    if not is_original() and what.exc_type is SystemExit:
        os._exit(0)
    sys.__unraisablehook__(what)


def fork(chance: random.Random) -> None:
    """Make a child that does one of these deeds; return in the parent alone.

    A SystemExit ends only its thread, unless that is the main one.
    """
    deed = chance.choice(DEEDS)
    is_main = threading.current_thread() is threading.main_thread()
    if "exit" in deed and not is_main:
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
        os.write(2, f"{os.getpid()} leaves from {''.join(traceback.format_stack())}".encode())
        sys.exit(0)  # through whatever this thread was doing
    os._exit(0)


def reap(*, wait: bool) -> None:
    """Note which children have ended, and which should have."""
    check_original()
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
                NOTES.wrong(f"{pid}, a forked child that was to {deed}, has not ended well: {code}")
            return True
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGQUIT)  # its stacks
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            late = f"{pid}, a forked child that was to {deed}, had not ended"
            NOTES.wrong(f"{late} after {SECONDS:g} s")
            return True
        if not wait:
            return False
        time.sleep(0.01)
