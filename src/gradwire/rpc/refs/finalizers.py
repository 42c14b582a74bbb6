"""Notes that objects have died: those which stand for references, and futures that failed unseen.

A finalizer may run on any thread, in the middle of anything: it puts a note in a queue and does
nothing else. A thread of the worker's own takes the notes out.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import final

from gradwire import threads
from gradwire.rpc.refs.handles_state import RefHandle

_JOIN_SECONDS = 5.0


@final
class FinalizerQueue:
    """For one worker; `ended` is told of every hold that is over."""

    def __init__(self, name: str, ended: Callable[[RefHandle], None]) -> None:
        self._name, self._ended = name, ended
        self._lock = threading.RLock()
        self._deaths: queue.SimpleQueue[RefHandle | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether there are notes that nobody has taken."""
        return not self._deaths.empty()

    def watch(self, rref: object, hold: RefHandle) -> None:
        """When this object dies, the hold ends."""
        self._begin()
        # SimpleQueue.put is safe in a finalizer: it takes no lock that its thread could hold.
        weakref.finalize(rref, self._deaths.put, hold).atexit = False

    def on_death(self, what: object, call: Callable[[], None]) -> None:
        """When this object dies, `call` is called, on the thread of this finalizer queue."""
        self._begin()
        weakref.finalize(what, self._died, call).atexit = False

    def close(self) -> None:
        """Take what is there, and stop."""
        self._closed = True
        self._deaths.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _begin(self) -> None:
        if self._thread is not None or self._closed:
            return
        thread = threads.thread(self._name, self._clean)
        with self._lock:  # no calls in here, see docs/threads.md
            is_first = self._thread is None and not self._closed
            if is_first:
                self._thread = thread
        if is_first:
            thread.start()

    def _died(self, call: Callable[[], None]) -> None:
        """Runs in a finalizer. When the worker has left, no thread takes notes any more."""
        if self._closed:
            call()
        else:
            self._deaths.put(call)

    def _clean(self) -> None:
        while (note := self._deaths.get()) is not None:
            if isinstance(note, RefHandle):
                self._ended(note)
            else:
                note()
