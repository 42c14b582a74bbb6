"""Graceful shutdown: which phase each peer has reached, and when this worker may close.

Three phases. *Over* (1): a worker's program has ended; it still serves. *Quiet* (2): all are over,
and this worker has no request in flight. When all are quiet, no request will be made again. *Ready*
(3): it has checked what the others left behind here, and they may close. A worker closes when all
are ready and have confirmed that they know it of this worker: its last message may be lost with a
connection, and behind a proxy a closed port looks like a network that is cut.

Waiting for the programs of the others has no deadline: a worker that only serves does so inside
`shutdown`. The time for shutting down begins when each program is over or its worker lost. A lost
worker is waited for until that time is over; if it comes back, the time begins anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import final

from gradwire.ids import WorkerId

OVER, QUIET, READY = 1, 2, 3


@final
class ShutdownProgress:
    """Which phase each peer of one worker has reached, and which peers are lost."""

    def __init__(self, others: Iterable[WorkerId]) -> None:
        self._phase: dict[WorkerId, int] = dict.fromkeys(others, 0)
        self._gone: set[WorkerId] = set()
        self._disconnected: set[WorkerId] = set()
        self._untold: set[WorkerId] = set()  # peers that may not know our phase
        self.confirmed: set[WorkerId] = set()  # peers that know that we are ready
        self._epochs: Counter[WorkerId] = Counter()  # how often each peer was lost or came back
        self.until: float | None = None  # when the time to shut down is over, if it has begun

    def reached(self, worker: WorkerId, phase: int) -> None:
        """A peer has reached a phase. Phases only grow, so repeats do no harm."""
        self._disconnected.discard(worker)
        self._phase[worker] = max(phase, self._phase.get(worker, 0))

    def may_be_gone(self, worker: WorkerId) -> bool:
        """Whether a peer has no reason to stay: it is ready, and knows that we are."""
        return self.has_reached(worker, READY) and worker in self.confirmed

    def unconfirmed(self) -> list[WorkerId]:
        """The peers that are ready and may not know that we are."""
        known = self._gone | self.confirmed
        return sorted(w for w, p in self._phase.items() if p >= READY and w not in known)

    def peer_lost(self, worker: WorkerId) -> None:
        """A peer is gone for good."""
        self._gone.add(worker)
        self._disconnected.discard(worker)
        self._untold.discard(worker)

    def refused(self, worker: WorkerId, epoch: int) -> None:
        """A peer's port was found closed in this epoch; ignored if it has come back since."""
        if self.epoch(worker) == epoch:
            self.peer_lost(worker)

    def disconnected(self, worker: WorkerId) -> bool:
        """A peer is lost, and may come back. True if no thread repeats our last message yet."""
        self._epochs[worker] += 1
        self._disconnected.add(worker)
        return self._owe(worker)

    def connected(self, worker: WorkerId) -> bool:
        """A connection to a peer was made, by either side. True as for `disconnected`."""
        was_gone = worker in self._gone
        self.is_back(worker)
        return was_gone and self._owe(worker)

    def is_untold(self, worker: WorkerId) -> bool:
        """Whether it was lost, and since then neither told our phase nor found to be gone."""
        return worker in self._untold

    def epoch(self, worker: WorkerId) -> int:
        """A number that grows whenever the peer is lost or comes back."""
        return self._epochs[worker]

    def told(self, worker: WorkerId, epoch: int) -> None:
        """A peer was told our phase in this epoch; ignored if it was lost since."""
        if self.epoch(worker) == epoch:
            self._untold.discard(worker)
            self._disconnected.discard(worker)

    def _owe(self, worker: WorkerId) -> bool:
        is_first = worker not in self._untold
        self._untold.add(worker)
        return is_first

    def is_back(self, worker: WorkerId) -> None:
        """A peer that was lost or taken for gone is connected again."""
        self._epochs[worker] += 1
        self._disconnected.discard(worker)
        self._gone.discard(worker)

    def reborn(self, worker: WorkerId) -> None:
        """A peer is back as a later incarnation, which has reached no phase yet."""
        self.is_back(worker)
        self._phase[worker] = 0
        self.confirmed.discard(worker)

    def has_reached(self, worker: WorkerId, phase: int) -> bool:
        """Whether the present incarnation of a peer has reached a phase."""
        return self._phase.get(worker, 0) >= phase

    def blockers(self, missing: Iterable[WorkerId], silent: Iterable[WorkerId]) -> list[WorkerId]:
        """Those of the missing peers for which the others may be waiting; all, if unknown."""
        # A peer that is connected and gives signs of life is late because it waits for others.
        unheard = self._disconnected.union(silent)
        return [worker for worker in missing if worker in unheard] or list(missing)

    def seconds_left(self, now: float, seconds: float) -> float:
        """What is left of so many seconds, which begin when no program is known to run."""
        if self._disconnected.issuperset(self.missing(OVER)):
            if self.until is None:
                self.until = now + seconds
            return self.until - now
        self.until = None
        return math.inf

    def missing(self, phase: int) -> list[WorkerId]:
        """The peers that have not reached a phase and may still do so."""
        return sorted(w for w, p in self._phase.items() if p < phase and w not in self._gone)

    def lost_before_quiet(self) -> list[WorkerId]:
        """The peers that were lost before they were quiet."""
        return sorted(w for w in self._gone if self._phase.get(w, QUIET) < QUIET)
