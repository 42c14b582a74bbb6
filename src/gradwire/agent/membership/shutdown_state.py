"""Leaving together: who has finished, who is gone, when this worker may close.

Three rounds. *Over* (phase 1): a worker's program has ended, it still serves. *Quiet* (phase 2):
all are over, and nothing of its own is in flight. When all are quiet nobody will be asked anything
again. *Ready* (phase 3): it has looked at what the others left behind with it, and does not mind if
they go. Pure: the driver counts what is in flight and says so.

To wait for the programs of the others is not yet to shut down, and has no deadline: a worker that
only serves does so from inside `shutdown`. The time for shutting down begins when no program is
known to run any more, because each is over or its worker is lost. A lost worker that may come back
is waited for until that time is over, and if it comes back, the time begins anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import final

from gradwire.ids import WorkerId

OVER, QUIET, READY = 1, 2, 3


@final
class Departure:
    """What one worker knows of how far the others are."""

    def __init__(self, others: Iterable[WorkerId]) -> None:
        self._phase: dict[WorkerId, int] = dict.fromkeys(others, 0)
        self._gone: set[WorkerId] = set()
        self._cut_off: set[WorkerId] = set()
        self._untold: set[WorkerId] = set()
        """who may not have heard how far we are"""
        self._changes: Counter[WorkerId] = Counter()
        """how often each was lost or came back"""

    def said(self, worker: WorkerId, phase: int) -> None:
        """A peer has reached a phase. Phases only grow, so repeats do no harm."""
        self._cut_off.discard(worker)
        self._phase[worker] = max(phase, self._phase.get(worker, 0))

    def peer_lost(self, worker: WorkerId) -> None:
        """It will say nothing more. One that had not said it was quiet is missed by `abandoned`."""
        self._gone.add(worker)
        self._cut_off.discard(worker)
        self._untold.discard(worker)

    def refused(self, worker: WorkerId, change: int) -> None:
        """Nobody listened where it did when it was tried to reach; old news if it is back since."""
        if self.change(worker) == change:
            self.peer_lost(worker)

    def cut_off(self, worker: WorkerId) -> bool:
        """It is lost, but may come back: it is waited for, as long as shutting down may take.

        What we said last may be lost with the connection. True if nobody tries to say it again yet.
        """
        self._changes[worker] += 1
        self._cut_off.add(worker)
        return self._owe(worker)

    def joined(self, worker: WorkerId) -> bool:
        """A connection to it was made: by it, or by us. True as for `cut_off`."""
        was_gone = worker in self._gone
        self.is_back(worker)
        return was_gone and self._owe(worker)

    def is_untold(self, worker: WorkerId) -> bool:
        """Whether it was lost, and neither told since how far we are nor found to be gone."""
        return worker in self._untold

    def change(self, worker: WorkerId) -> int:
        """A number that is another one whenever it was lost or came back."""
        return self._changes[worker]

    def told(self, worker: WorkerId, change: int) -> None:
        """It was told how far we are; old news if it was lost since."""
        if self.change(worker) == change:
            self._untold.discard(worker)
            self._cut_off.discard(worker)

    def _owe(self, worker: WorkerId) -> bool:
        is_first = worker not in self._untold
        self._untold.add(worker)
        return is_first

    def is_back(self, worker: WorkerId) -> None:
        """It was cut off, or taken for gone, and has been reached again."""
        self._changes[worker] += 1
        self._cut_off.discard(worker)
        self._gone.discard(worker)

    def reborn(self, worker: WorkerId) -> None:
        """It is back in a later life, which has said nothing yet."""
        self.is_back(worker)
        self._phase[worker] = 0

    def has_reached(self, worker: WorkerId, phase: int) -> bool:
        """Whether a peer has come so far, in the life that it is in."""
        return self._phase.get(worker, 0) >= phase

    def causes(self, missing: Iterable[WorkerId], silent: Iterable[WorkerId]) -> list[WorkerId]:
        """For whom the others that are missing may wait too; all, if that is not known.

        A worker that is connected and gives signs of life is late only as it waits for others.
        """
        unheard = self._cut_off.union(silent)
        return [worker for worker in missing if worker in unheard] or list(missing)

    def working(self) -> list[WorkerId]:
        """Whose programs still run, as far as is known."""
        return [worker for worker in self.missing(OVER) if worker not in self._cut_off]

    def missing(self, phase: int) -> list[WorkerId]:
        """Who has not reached a phase and may still do so."""
        return sorted(w for w, p in self._phase.items() if p < phase and w not in self._gone)

    def abandoned(self) -> list[WorkerId]:
        """Who was lost before it was quiet."""
        return sorted(w for w in self._gone if self._phase.get(w, QUIET) < QUIET)


@final
class Patience:
    """How long to wait yet; see the top of this file."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def left(self, now: float, departure: Departure) -> float:
        """Seconds; without end while a program runs."""
        if departure.working():
            self._until = None
            return math.inf
        if self._until is None:
            self._until = now + self._seconds
        return self._until - now
