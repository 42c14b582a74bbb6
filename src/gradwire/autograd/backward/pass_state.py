"""One backward pass, seen from one worker.

Rules of this file:
  1. Pure: no torch, no threads, no clock, and of gradients only the ids of their edges.
  2. Every edge is settled exactly once per pass and collected exactly once by the Send that waits
     for it. What is settled may be early (before the pass is known here), never twice.
  3. A pass is done when every worker asked is done. One that has changed no leaf has nothing to
     keep or to roll back: for it a pass is over with its run.

A *run* is one execution of torch's engine over this worker's Sends of the pass. The sets without an
underscore are read directly by `ActivePass`: a method call costs more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from gradwire.errors import BadMessage
from gradwire.ids import EdgeId, PassId, WorkerId


@final
class PassState:
    """What one worker knows of one pass. At the coordinator, `asked` are the participants."""

    _sends = _recvs_left = 0

    def __init__(self, pass_id: PassId, asked: Iterable[WorkerId] = ()) -> None:
        self.id = pass_id
        self.asked = frozenset(asked)
        self.waiting_for = set(self.asked)
        """the participants whose runs are not over"""
        self.changed: set[WorkerId] = set()
        """the participants that have changed leaves, and must hear of a good end"""
        self.settled: set[EdgeId] = set()
        """the edges whose gradients have arrived"""
        self.to_collect: set[EdgeId] = set()
        """the settled edges whose Send has not run; none may remain after a run"""

    def edge_settled(self, edge: EdgeId) -> None:
        """The gradients of an edge have arrived."""
        if edge in self.settled:
            raise BadMessage(f"{edge} was settled twice in {self.id}")
        self.settled.add(edge)
        self.to_collect.add(edge)

    def edge_collected(self, edge: EdgeId) -> None:
        """The Send of this edge has taken its gradients."""
        assert edge in self.settled, f"{edge} was collected before it was settled"
        assert edge in self.to_collect, f"{edge} was collected twice in {self.id}"
        self.to_collect.remove(edge)

    def run_counted(self, sends: int, recvs: int) -> None:
        """The run here is over, but for leaves, after this many Sends and Recvs."""
        self._sends, self._recvs_left = sends, recvs

    def recv_through(self) -> bool:
        """A Recv has run. Whether it was the last node, but for leaves, of a counted run."""
        self._recvs_left -= 1
        return self._recvs_left == 0 and len(self.settled) - len(self.to_collect) == self._sends

    def worker_done(self, worker: WorkerId, *, has_changed: bool) -> None:
        """A participant's run is over."""
        if worker not in self.waiting_for:
            raise BadMessage(f"worker {worker} ended {self.id} without having been asked to run")
        self.waiting_for.discard(worker)
        if has_changed:
            self.changed.add(worker)

    def unfinished(self) -> list[WorkerId]:
        """The participants for which the coordinator still waits."""
        return sorted(self.waiting_for)

    def concerns(self, worker: WorkerId) -> bool:
        """Whether the pass cannot end well without this worker, whatever is settled.

        That includes participants that are done and have changed leaves. When they lose the
        coordinator they ask how the pass ended, and while it runs the answer is: not well.
        """
        return worker in self.waiting_for or worker in self.changed or worker == self.id.worker
