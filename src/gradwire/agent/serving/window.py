"""How much may be on its way to one peer: a fast caller does not fill a slow callee's memory.

Counted are the bytes of calls that have no answer yet. Who wants to send more waits for answers, up
to the deadline of the call. A call that is made by a function which a peer called does not wait:
the answers it would wait for may in turn wait for it.
"""

from __future__ import annotations

import threading
from typing import final

from gradwire.agent.requests.clock import Clock
from gradwire.errors import CallTimeout
from gradwire.ids import WorkerId


@final
class Window:
    """Of one worker, towards each of its peers."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._most, self._clock = most, clock
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._waiting = 0
        self._under_way: dict[WorkerId, int] = {}

    def maybe_enter(self, peer: WorkerId, size: int) -> bool:
        """So many bytes are about to leave; False, and not counted, if they have to wait.

        hot: every call
        """
        sizes = self._under_way
        with self.lock:  # no calls in here, see docs/threads.md
            under_way = 0
            if peer in sizes:
                under_way = sizes[peer]
            has_room = not under_way or under_way + size <= self._most
            if has_room:
                sizes[peer] = under_way + size
        return has_room

    def enter(self, peer: WorkerId, size: int, deadline: float, what: str) -> None:
        """They wait for room if need be; a call larger than the window goes by itself."""
        with self.lock:
            under_way = self._under_way.setdefault(peer, 0)
            if under_way and under_way + size > self._most:
                self._waiting += 1
                try:
                    self._wait_for_room(peer, size, deadline, what)
                finally:
                    self._waiting -= 1
            self._under_way[peer] += size

    def _wait_for_room(self, peer: WorkerId, size: int, deadline: float, what: str) -> None:
        while self._under_way[peer] and self._under_way[peer] + size > self._most:
            left = deadline - self._clock.now()
            if left <= 0:
                raise CallTimeout(
                    f"{what} did not leave in time: {self._under_way[peer]} bytes of calls to "
                    "the same worker have no answer yet",
                    hint="wait for some of them, or raise Limits(in_flight=…)",
                )
            self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def pass_by(self, peer: WorkerId, size: int) -> None:
        """They leave without waiting."""
        sizes = self._under_way
        with self.lock:
            sizes[peer] = sizes[peer] + size if peer in sizes else size

    def leave(self, peer: WorkerId, size: int, _outcome: object = None) -> None:
        """Their call was answered, or given up."""
        with self.lock:
            self._under_way[peer] -= size
            if self._waiting:
                self._changed.notify_all()
