"""Leaving together: who has finished, who is gone, when this worker may close.

Three rounds. *Over* (phase 1): a worker's program has ended, it still serves. *Quiet* (phase 2):
all are over, and nothing of its own is in flight. When all are quiet nobody will be asked anything
again. *Ready* (phase 3): it has looked at what the others left behind with it, and does not mind if
they go. Pure: the driver counts what is in flight and says so.
"""

from __future__ import annotations

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

    def said(self, worker: WorkerId, phase: int) -> None:
        """A peer has reached a phase. Phases only grow, so repeats do no harm."""
        self._phase[worker] = max(phase, self._phase.get(worker, 0))

    def peer_lost(self, worker: WorkerId) -> None:
        """It will say nothing more. One that had not said it was quiet is missed by `abandoned`."""
        self._gone.add(worker)

    def reborn(self, worker: WorkerId) -> None:
        """It is back in a later life, which has said nothing yet."""
        self._gone.discard(worker)
        self._phase[worker] = 0

    def has_reached(self, worker: WorkerId, phase: int) -> bool:
        """Whether a peer has come so far, in the life that it is in."""
        return self._phase.get(worker, 0) >= phase

    def missing(self, phase: int) -> list[WorkerId]:
        """Who has not reached a phase and may still do so."""
        return sorted(w for w, p in self._phase.items() if p < phase and w not in self._gone)

    def abandoned(self) -> list[WorkerId]:
        """Who was lost before it was quiet."""
        return sorted(w for w in self._gone if self._phase.get(w, QUIET) < QUIET)
