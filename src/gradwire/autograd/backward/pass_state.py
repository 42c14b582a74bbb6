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

The sets without an underscore are there to be read: asking costs more than the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from gradwire.errors import BadMessage
from gradwire.ids import EdgeId, PassId, WorkerId


@final
class PassState:
    """What one worker knows of one pass. At its root, `asked` are the workers it tells to run."""

    __slots__ = (
        "_recvs_left",
        "_sends",
        "asked",
        "changed",
        "failed",
        "id",
        "settled",
        "to_collect",
        "waiting_for",
    )

    def __init__(self, pass_id: PassId, asked: Iterable[WorkerId] = ()) -> None:
        self.id = pass_id
        self.asked = frozenset(asked)
        self.waiting_for = set(self.asked)
        """those whose runs are not over"""
        self.changed: set[WorkerId] = set()
        """those that want to hear of a good end"""
        self.settled: set[EdgeId] = set()
        """those whose Sends may go on"""
        self.to_collect: set[EdgeId] = set()
        """those that no Send has asked for; none may remain after a run"""
        self._sends = self._recvs_left = 0
        self.failed = False

    def edge_settled(self, edge: EdgeId) -> None:
        """Its gradients are here."""
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
        """The run here is through when these many Sends and Recvs are, but for its leaves."""
        self._sends, self._recvs_left = sends, recvs

    def recv_through(self) -> bool:
        """A Recv has run. Whether that was the last thing of a run that was counted."""
        self._recvs_left -= 1
        return self._recvs_left == 0 and len(self.settled) - len(self.to_collect) == self._sends

    def worker_done(self, worker: WorkerId, *, has_changed: bool) -> None:
        """A worker's run is over."""
        if worker not in self.waiting_for:
            raise BadMessage(f"worker {worker} ended {self.id} without having been asked to run")
        self.waiting_for.discard(worker)
        if has_changed:
            self.changed.add(worker)

    def unfinished(self) -> list[WorkerId]:
        """Whom the root still waits for."""
        return sorted(self.waiting_for)

    def concerns(self, worker: WorkerId) -> bool:
        """Whether the pass cannot end well without this worker, whatever is settled.

        One that is done and has changed leaves asks how the pass has ended when it loses the root.
        While the pass runs the answer is that it has not ended well.
        """
        return worker in self.waiting_for or worker in self.changed or worker == self.id.worker

    def pass_failed(self) -> bool:
        """An error ends the pass; True for the first one, which is the one to tell."""
        first, self.failed = not self.failed, True
        return first
