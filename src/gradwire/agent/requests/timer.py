"""The one thread of a worker that watches deadlines.

It asks each registered watcher what is late, and sleeps until the earliest deadline any of them
names. Started by the first deadline, so that a worker that waits for nothing has no such thread.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import final

from gradwire import threads
from gradwire.agent.requests.clock import Clock

_log = logging.getLogger("gradwire")
_JOIN_SECONDS = 5.0
_AGAIN_SECONDS = 1.0

Watcher = Callable[[float], float | None]
"""Told the time, it acts on what is late and returns its next deadline. It must not block."""


@final
class Timer:
    """Owns the thread; the watchers own the decisions."""

    may_wait = False
    """it ends the waits of others by their deadlines"""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self.lock = threading.RLock()
        self._wake = threading.Condition(self.lock)
        self._watchers: list[Watcher] = []
        self.armed = math.inf
        """the earliest moment at which it is awake; whoever needs no earlier one need not ask"""
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, watcher: Watcher) -> None:
        """Ask this one too."""
        self._watchers.append(watcher)

    def need(self, deadline: float) -> None:
        """Be awake at this moment; cheap when an earlier one is already known."""
        if deadline >= self.armed:
            return
        with self._wake:
            if self._closed:
                return
            self.armed = min(self.armed, deadline)
            if self._thread is None:
                self._thread = threads.thread(self._name, self._loop, self)
                self._thread.start()
            self._wake.notify()

    def hand_over(self, line: object) -> None:
        """Nobody can take its place: `WorkerLocks` refuses the wait."""

    def close(self) -> None:
        """Stop watching and join the thread; idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._closed and self._clock.now() < self.armed:
                    self._clock.sleep(self._wake, None if self.armed == math.inf else self.armed)
                if self._closed:
                    return
                # Before asking: a deadline that comes while the watchers are asked arms us anew.
                self.armed = math.inf
            for watcher in self._watchers:
                try:
                    deadline = watcher(self._clock.now())
                except Exception:  # every other wait depends on this thread
                    _log.exception("%s: a watcher failed", self._name)
                    deadline = self._clock.now() + _AGAIN_SECONDS
                if deadline is not None:
                    self.need(deadline)
