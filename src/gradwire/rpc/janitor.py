"""The end of references: noted anywhere, dealt with on a thread that has nothing else to do.

A reference may die in the middle of a garbage collection that interrupted code holding any lock.
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
    """Of one worker. Its thread starts with the first reference that it watches."""

    def __init__(self, name: str, ended: Callable[[Hold], None]) -> None:
        self._name, self._ended = name, ended
        self._lock = threading.Lock()
        self._deaths: queue.SimpleQueue[Hold | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def has_work(self) -> bool:
        """Whether a reference has died that was not dealt with."""
        return not self._deaths.empty()

    def watch(self, rref: object, hold: Hold) -> None:
        """When this object dies, the hold ends."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._clean, name=self._name, daemon=True)
                self._thread.start()
        # SimpleQueue.put is safe in a finalizer: it takes no lock that its thread could hold.
        weakref.finalize(rref, self._deaths.put, hold).atexit = False

    def close(self) -> None:
        """Stop the thread."""
        self._deaths.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _clean(self) -> None:
        while (hold := self._deaths.get()) is not None:
            self._ended(hold)
