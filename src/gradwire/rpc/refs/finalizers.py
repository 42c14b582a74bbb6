"""A queue for finalizers: what has to happen when a reference or a future is garbage collected.

A finalizer may run on any thread, between any two instructions, with any lock held. So it only puts
an entry into a queue; a thread of the worker takes the entries out and acts.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire import threads
from gradwire.rpc.refs.handles_state import RefHandle

_JOIN_SECONDS = 5.0


@final
class FinalizerQueue:
    """The queue and thread of one worker; `ended` is called for each handle that has ended."""

    def __init__(self, name: str, ended: Callable[[RefHandle], None]) -> None:
        self._name, self._ended = name, ended
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.closed = False

    @property
    def is_busy(self) -> bool:
        """Whether the queue has entries."""
        return not self._queue.empty()

    def watch(self, rref: object, handle: RefHandle) -> None:
        """When `rref` dies, its handle ends."""
        self._begin()
        # SimpleQueue.put is safe in a finalizer: it takes no lock that its thread could hold.
        weakref.finalize(rref, self._queue.put, partial(self._ended, handle)).atexit = False

    def on_death(self, what: object, call: Callable[[], None]) -> None:
        """When `what` dies, run `call` on the thread of this queue."""
        self._begin()
        weakref.finalize(what, self._died, call).atexit = False

    def close(self) -> None:
        """Process what is in the queue, and stop the thread."""
        self.closed = True
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _begin(self) -> None:
        if self._thread is not None or self.closed:
            return
        thread = threads.thread(self._name, self._run)
        with self._lock:  # no calls in here, see docs/threads.md
            is_first = self._thread is None and not self.closed
            if is_first:
                self._thread = thread
        if is_first:
            thread.start()

    def _died(self, call: Callable[[], None]) -> None:
        """Runs in a finalizer. After close() no thread would take the entry, so call it here."""
        if self.closed:
            call()
        else:
            self._queue.put(call)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            entry()
