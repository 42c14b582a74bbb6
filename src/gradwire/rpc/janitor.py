"""Notes that the objects which stand for references have died.

A finalizer may run on any thread, in the middle of anything: it puts a note in a queue and does
nothing else. A thread of the worker's own takes the notes out.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import final

from gradwire.rpc.holds_state import Hold

_JOIN_SECONDS = 5.0


@final
class Janitor:
    """For one worker; `ended` is told of every hold that is over."""

    def __init__(self, name: str, ended: Callable[[Hold], None]) -> None:
        self._name, self._ended = name, ended
        self._lock = threading.RLock()
        self._deaths: queue.SimpleQueue[Hold | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there are notes that nobody has taken."""
        return not self._deaths.empty()

    def watch(self, rref: object, hold: Hold) -> None:
        """When this object dies, the hold ends."""
        if self._thread is None:
            thread = threading.Thread(target=self._clean, name=self._name, daemon=True)
            with self._lock:
                is_first = self._thread is None
                if is_first:
                    self._thread = thread
            if is_first:
                thread.start()
        # SimpleQueue.put is safe in a finalizer: it takes no lock that its thread could hold.
        weakref.finalize(rref, self._deaths.put, hold).atexit = False

    def close(self) -> None:
        """Take what is there, and stop."""
        self._deaths.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _clean(self) -> None:
        while (hold := self._deaths.get()) is not None:
            self._ended(hold)
