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
from typing import Final, Protocol, final

from gradwire.agent.requests.ends import Tally
from gradwire.agent.requests.timer import Clock
from gradwire.errors import CallTimeout, OverLimit
from gradwire.ids import WorkerId

EACH: Final = 1024  # about how many bytes a message takes besides its own


class Weighed(Protocol):
    """A message to a peer that counts with its bytes until it is answered."""

    size: int
    """what it counts for now; changed only by the limit"""

    @property
    def peer(self) -> WorkerId:
        """Its receiver."""

    @property
    def deadline(self) -> float:
        """Until when it may wait."""

    @property
    def description(self) -> str:
        """Its name in an error."""


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

    def maybe_count(self, message: Weighed, size: int) -> bool:
        """Count a message with its bytes; False, if that is over the limit. hot: every call

        Its `size` changes in one step with the count: whoever interrupts the thread, `uncount`
        gives back what was taken, once.
        """
        counts, peer = self._taken, message.peer
        with self.lock:  # no calls in here, see docs/threads.md
            total = counts[peer] + size if peer in counts else size
            if total <= self._most or (self._one_may_exceed and total == size):
                counts[peer] = total
                message.size = size
                return True
        return False

    def count_anyway(self, message: Weighed, size: int) -> None:
        """Count a message, over the limit if need be."""
        counts, peer = self._taken, message.peer
        with self.lock:  # no calls in here, see docs/threads.md
            counts[peer] = counts[peer] + size if peer in counts else size
            message.size = size

    def uncount(self, message: Weighed, ended: Tally) -> None:
        """A message is gone, and is one more of those that `ended` in this way, by peer.

        Harmless if it was not counted, or is not any more. hot: every call
        """
        counts, peer = self._taken, message.peer
        with self.lock:
            if message.size:  # one step, up to the end of the block
                counts[peer] = counts[peer] - message.size
                message.size = 0
                ended[peer] = ended[peer] + 1 if peer in ended else 1
            if self._waiting:
                self._given_back.notify_all()

    def take(self, peer: WorkerId, count: int = 1) -> None:
        """Take so many; OverLimit, and none is taken, if that is over the limit."""
        if not self.maybe_take(peer, count):
            raise over(self._what, self._most)

    def count_when_free(self, message: Weighed, size: int, clock: Clock, unsent: Tally) -> None:
        """Count a message, and wait for others to be gone if need be.

        CallTimeout if that takes too long: then it is one more of those that are `unsent`.
        """
        with self.lock:
            self._waiting += 1
            try:
                while not self.maybe_count(message, size):
                    left = message.deadline - clock.now()
                    if left <= 0:
                        one_more(unsent, message.peer)
                        taken = self.taken(message.peer)
                        raise CallTimeout(
                            f"{message.description} did not leave in time: {taken} bytes of "
                            "calls to the same worker have no answer yet",
                            hint=f"wait for some of them, or raise Limits({self._what}=…)",
                        )
                    self._given_back.wait(min(left, threading.TIMEOUT_MAX))
            finally:
                self._waiting -= 1

    def give_back(self, peer: WorkerId, count: int = 1) -> None:
        """So many are gone."""
        counts = self._taken
        with self.lock:
            if peer in counts:
                # One statement: a nested call on this thread may come between any two. For the
                # same reason an entry stays when it is 0.
                counts[peer] = counts[peer] - count if counts[peer] > count else 0

    def taken(self, peer: WorkerId) -> int:
        """How many the peer has."""
        return self._taken.get(peer, 0)


def over(what: str, most: int) -> OverLimit:
    """The error for one too many."""
    return OverLimit(
        f"a peer has {most} {what} open here already, which is the limit",
        hint=f"end some of them, or raise Limits({what}=…) on the worker that refused",
    )


def one_more(tally: Tally, peer: WorkerId) -> None:
    """Add one. There are no calls in here, so no other thread runs in between. hot: each call"""
    tally[peer] = tally[peer] + 1 if peer in tally else 1
