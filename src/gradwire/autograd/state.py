"""One backward pass, seen from one worker.

Rules of this file:
  1. Pure. No torch, no threads, no clock: gradients stay with the engine, this file sees only
     the ids of their edges.
  2. Every edge is settled exactly once per pass and collected exactly once by the Send that waits
     for it. What is settled may be early (before the pass is known here), never twice.
  3. A pass ends once: done when every worker asked is done, failed with the first error.
  4. A worker that has changed no leaf has nothing to keep or to put back: for it a pass is over
     with its run.

A *run* is one execution of torch's engine over this worker's sends of the pass; it waits
at each send until that edge is settled. The *root* is the worker where the pass began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from gradwire.errors import BadMessage
from gradwire.ids import EdgeId, PassId, WorkerId


@final
class PassState:
    """What one worker knows of one pass."""

    def __init__(self, pass_id: PassId) -> None:
        self.id = pass_id
        self._settled: set[EdgeId] = set()
        self._collected: set[EdgeId] = set()
        self._expected: Mapping[EdgeId, WorkerId] = {}
        self._waiting_for: set[WorkerId] = set()
        self._asked: frozenset[WorkerId] = frozenset()
        self._changed: set[WorkerId] = set()
        self._sends = self._recvs_left = 0
        self.failed = False

    @property
    def asked(self) -> frozenset[WorkerId]:
        """The workers that the root has told to run."""
        return self._asked

    def workers_asked(self, workers: Iterable[WorkerId]) -> None:
        """The root is about to tell these to run."""
        self._asked = frozenset(workers)
        self._waiting_for = set(self._asked)

    def edges_expected(self, edges: Mapping[EdgeId, WorkerId]) -> None:
        """The run here waits for each of these, by whom it will be settled."""
        self._expected = edges

    def edge_settled(self, edge: EdgeId) -> None:
        """Its gradients are here."""
        if edge in self._settled:
            raise BadMessage(f"{edge} was settled twice in {self.id}")
        self._settled.add(edge)

    def is_settled(self, edge: EdgeId) -> bool:
        """Whether the Send of this edge may go on."""
        return edge in self._settled

    def edge_collected(self, edge: EdgeId) -> None:
        """The Send of this edge has taken its gradients."""
        assert edge in self._settled, f"{edge} was collected before it was settled"
        assert edge not in self._collected, f"{edge} was collected twice in {self.id}"
        self._collected.add(edge)

    def uncollected(self) -> list[EdgeId]:
        """Edges that were settled and that no Send has asked for; none may remain after a run."""
        return sorted(self._settled - self._collected)

    def run_counted(self, sends: int, recvs: int) -> None:
        """The run here is through when these many Sends and Recvs are: it reaches no leaf."""
        self._sends, self._recvs_left = sends, recvs

    def recv_through(self) -> bool:
        """A Recv has run. Whether that was the last thing of a run that was counted."""
        self._recvs_left -= 1
        return self._recvs_left == 0 and len(self._collected) == self._sends

    def worker_done(self, worker: WorkerId, *, has_changed: bool) -> None:
        """A worker's run is over."""
        if worker not in self._waiting_for:
            raise BadMessage(f"worker {worker} ended {self.id} without having been asked to run")
        self._waiting_for.discard(worker)
        if has_changed:
            self._changed.add(worker)

    def changed(self) -> list[WorkerId]:
        """The workers that want to hear of a good end."""
        return sorted(self._changed)

    def unfinished(self) -> list[WorkerId]:
        """Whom the root still waits for."""
        return sorted(self._waiting_for)

    def is_done(self, worker: WorkerId) -> bool:
        """Whether the root waits for this one no more."""
        return worker not in self._waiting_for

    def concerns(self, worker: WorkerId) -> bool:
        """Whether the pass cannot end well without this worker."""
        if worker in self._waiting_for or worker == self.id.worker:
            return True
        return any(
            peer == worker and edge not in self._settled for edge, peer in self._expected.items()
        )

    def pass_failed(self) -> bool:
        """An error ends the pass; True for the first one, which is the one to tell."""
        first, self.failed = not self.failed, True
        return first
