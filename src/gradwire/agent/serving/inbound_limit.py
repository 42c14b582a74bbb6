"""Bytes that wait here to be served, by the peer that sent them.

A correct peer waits for answers once it has sent so much (`Limits.in_flight`). One that does not is
cut off before its messages fill this worker's memory. A message larger than the limit may wait
alone: its own size has a limit already.
"""

from __future__ import annotations

import threading
from typing import Final, final

from gradwire.agent.serving.thread_pool import Job
from gradwire.errors import OverLimit
from gradwire.ids import WorkerId
from gradwire.wire.frame import Frame

EACH: Final = 1024
"""What one message takes besides its bytes, about."""


@final
class InboundLimit:
    """Of one worker."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._waiting: dict[WorkerId, int] = {}

    def counted(self, peer: WorkerId, frame: Frame, job: Job) -> Job:
        """The job that serves a message, which counts as waiting until it is over."""
        size = EACH + len(frame.head) + sum(map(len, frame.payload))
        sizes = self._waiting
        with self._lock:  # no calls in here, see docs/threads.md
            waiting = 0
            if peer in sizes:
                waiting = sizes[peer]
            is_over = waiting > 0 and waiting + size > self._most
            if not is_over:
                sizes[peer] = waiting + size
        if is_over:
            raise OverLimit(
                f"{waiting} bytes of messages wait to be served, and {size} more have come: "
                f"the limit is {self._most}",
                hint="wait for answers before sending more, or raise Limits(unserved=…) there",
            )

        def run() -> None:
            try:
                job()
            finally:
                self._served(peer, size)

        return run

    def _served(self, peer: WorkerId, size: int) -> None:
        with self._lock:
            self._waiting[peer] -= size
            if self._waiting[peer] <= 0:
                del self._waiting[peer]
