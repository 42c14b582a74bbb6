"""Limits on what each peer may have open, queued or in flight here.

- Contexts, edges and runs that a peer has open: one too many is refused.
- Bytes of messages that wait to be served (`Limits.unserved`): a correct peer waits for answers
  before it has sent so much (`Limits.in_flight`), so the connection of any other is ended.
- Bytes of calls to a peer that have no answer yet (`Limits.in_flight`): a fast caller waits, so
  that it does not fill the memory of a slow callee. A call made by a served function does not
  wait: the answers it would wait for may depend on it.
"""

from __future__ import annotations

import threading
from typing import Final, final

from gradwire.agent.requests.timer import Clock
from gradwire.errors import CallTimeout, OverLimit
from gradwire.ids import WorkerId

EACH: Final = 1024  # about how many bytes a message takes besides its own


@final
class PeerLimit:
    """A limit for each peer on one kind of thing, with what each peer has taken of it.

    `what` names the things in the plural, as `Limits` does. With `one_may_exceed`, a single larger
    thing is let through when the peer has no other: its size is limited elsewhere.
    """

    def __init__(self, what: str, most: int, *, one_may_exceed: bool = False) -> None:
        self._what, self._most, self._one_may_exceed = what, most, one_may_exceed
        self.lock = threading.RLock()
        self._given_back = threading.Condition(self.lock)
        self._waiting = 0
        self._taken: dict[WorkerId, int] = {}

    def maybe_take(self, peer: WorkerId, count: int = 1) -> bool:
        """Take so many; False, and none is taken, if that is over the limit. hot: every call"""
        counts = self._taken
        # A finalizer that runs inside the lock may come here again on this thread. Without a call
        # in the block none can, so the count is not changed between the check and the update.
        with self.lock:  # no calls in here, see docs/threads.md
            total = counts[peer] + count if peer in counts else count
            if total <= self._most or (self._one_may_exceed and total == count):
                counts[peer] = total
                return True
        return False

    def take(self, peer: WorkerId, count: int = 1) -> None:
        """Take so many; OverLimit, and none is taken, if that is over the limit."""
        if not self.maybe_take(peer, count):
            raise over(self._what, self._most)

    def take_when_free(
        self, peer: WorkerId, count: int, deadline: float, clock: Clock, description: str
    ) -> None:
        """Take so many bytes, and wait for others to be given back if need be; CallTimeout."""
        with self.lock:
            self._waiting += 1
            try:
                while not self.maybe_take(peer, count):
                    left = deadline - clock.now()
                    if left <= 0:
                        raise CallTimeout(
                            f"{description} did not leave in time: {self.taken(peer)} bytes of "
                            "calls to the same worker have no answer yet",
                            hint=f"wait for some of them, or raise Limits({self._what}=…)",
                        )
                    self._given_back.wait(min(left, threading.TIMEOUT_MAX))
            finally:
                self._waiting -= 1

    def take_anyway(self, peer: WorkerId, count: int) -> None:
        """Take so many, over the limit if need be."""
        counts = self._taken
        with self.lock:
            counts[peer] = counts[peer] + count if peer in counts else count

    def give_back(self, peer: WorkerId, count: int = 1, _outcome: object = None) -> None:
        """So many are gone. hot: every call"""
        counts = self._taken
        with self.lock:
            if peer in counts:
                # One statement: a nested call on this thread may come between any two. For the
                # same reason an entry stays when it is 0.
                counts[peer] = counts[peer] - count if counts[peer] > count else 0
            if self._waiting:
                self._given_back.notify_all()

    def taken(self, peer: WorkerId) -> int:
        """How many the peer has."""
        return self._taken.get(peer, 0)


def over(what: str, most: int) -> OverLimit:
    """The error for one too many."""
    return OverLimit(
        f"a peer has {most} {what} open here already, which is the limit",
        hint=f"end some of them, or raise Limits({what}=…) on the worker that refused",
    )
