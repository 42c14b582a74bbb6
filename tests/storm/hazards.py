"""Finalizers, timers and signals that make calls while the process does something else."""

from __future__ import annotations

import contextvars
import gc
import random
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

import gradwire
from tests.storm import forks, rounds
from tests.storm.notes import NOTES

KINDS = ("finalizers", "timer", "signals", "forks", "threads")
_owed: deque[int] = deque()
_mood: dict = {"litter": None, "inside": False}


@contextmanager
def under(kinds: list[str], chance: random.Random) -> Iterator[None]:
    """These hazards, while the block runs; on the main thread."""
    before = gc.get_threshold()
    if "finalizers" in kinds:
        _mood["litter"] = random.Random(chance.random())
        gc.set_threshold(*chance.choice([(700, 10, 10), (100, 5, 5), (20, 3, 3)]))
    forking = random.Random(chance.random()) if "forks" in kinds else None
    handler = _handler(random.Random(chance.random()), forking)
    if "signals" in kinds:
        signal.signal(signal.SIGUSR1, handler)
    if "timer" in kinds:
        signal.signal(signal.SIGALRM, handler)
        interval = chance.choice([0.002, 0.01, 0.05])
        signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        _mood["litter"] = None
        gc.set_threshold(*before)
        settle()


# -- signals


def _handler(chance: random.Random, forking: random.Random | None):
    def handle(number: int, frame: FrameType | None) -> None:
        if _mood["inside"]:
            return
        _mood["inside"] = True
        try:
            if forking is not None and forking.random() < 0.02 and not _may_not_fork(frame):
                forks.fork(forking)
            else:
                me = gradwire.get_worker_info().name
                _say(chance.choice([name for name in rounds.WEIGHTS if name != me]), None)
                NOTES.done(f"calls of {signal.Signals(number).name}")
        except gradwire.UsageError as error:
            _refused(error)
        except Exception as error:
            NOTES.wrong(f"a signal handler raised {type(error).__name__}: {error}")
        finally:
            _mood["inside"] = False

    return handle


_LOCKED = ("/concurrent/futures/", "/asyncio/", "/logging/", "/storm/forks.py")


def _may_not_fork(frame: FrameType | None) -> bool:
    """Whether Python itself cannot be forked here.

    A thread pool, logging or a thread that starts may have a lock that `os.fork` waits for or that
    the child never gets, also in a fork that the signal interrupts. A child that leaves an event
    loop takes its file descriptors out of the epoll that it shares with its parent, which then
    never wakes.
    """
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _LOCKED):
            return True
        if frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "start":
            return True
        frame = frame.f_back
    return False


def _say(to: str, tensor: torch.Tensor | None) -> None:
    with torch.enable_grad():
        x = torch.ones(2, dtype=torch.float64) if tensor is None else tensor
        y = rounds.timed("call", lambda: gradwire.rpc_sync(to, rounds.touch, args=(x,)))
    if not torch.equal(y.detach(), x.detach() * 2):
        NOTES.wrong(f"{to} answered {y}, not twice {x}")


def _refused(error: gradwire.UsageError) -> None:
    """At once, and nothing is wrong with it if it says so."""
    if "a finalizer or a signal handler" in str(error):
        NOTES.done("refused")
    else:
        NOTES.wrong(f"a hazard raised {type(error).__name__}: {error}")


# -- finalizers


class Litter:
    """Makes a call when the collector finds it."""

    def __init__(self, to: str, tensor: torch.Tensor | None, carried: bool) -> None:
        self.itself = self
        self.to, self.tensor = to, tensor
        self.context = contextvars.copy_context() if carried else None
        _owed.append(1)

    def __del__(self) -> None:
        if not forks.is_original():
            _say(self.to, self.tensor)  # an error, not a hang
            return
        try:
            if self.context is None:
                _say(self.to, self.tensor)
            else:
                self.context.run(_say, self.to, self.tensor)
            NOTES.done("calls of finalizers")
        except gradwire.UsageError as error:
            _refused(error)
        except Exception as error:
            NOTES.wrong(f"a finalizer raised {type(error).__name__}: {error}")
        finally:
            _owed.append(-1)


def litter(tensor: torch.Tensor | None, names: list[str]) -> None:
    """Leave something behind for the collector, now and then."""
    chance = _mood["litter"]
    if chance is not None and chance.random() < 0.5:
        Litter(chance.choice(names), tensor, chance.random() < 0.5)


def owed() -> int:
    """Finalizers that have not ended."""
    return sum(tuple(_owed))


def settle() -> None:
    """Collect what uses the current context before it is closed."""
    pause = threading.Event()
    for _ in range(3000):
        if not owed() or not forks.is_original():  # a forked child leaves through here
            return
        gc.collect()  # does nothing while another thread collects
        pause.wait(0.005)
    NOTES.wrong(f"{owed()} finalizers have not ended")
