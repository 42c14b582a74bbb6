"""One pass while it runs on one worker: gradients that came, threads that wait for them.

The driver around `PassState`: one condition, decided under it, acted outside it. It waits without
a timeout of its own; the engine's timer fails a pass whose deadline is over, which wakes every
wait.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, final

import torch

from gradwire.agent.failure import fresh
from gradwire.autograd.context import Context
from gradwire.autograd.ledger import Ledger
from gradwire.autograd.messages import Crossing
from gradwire.autograd.state import PassState
from gradwire.errors import BackwardTimeout, BadMessage
from gradwire.ids import EdgeId, PassId, WorkerId


class Settlement(NamedTuple):
    """What an edge was settled with."""

    gradients: list[torch.Tensor | None]
    crossings: list[Crossing]


@final
class Running:
    """See the top of this file. `ledger` is None until the run here has begun."""

    def __init__(self, id: PassId, context: Context, deadline: float) -> None:
        self.id = id
        self.context = context
        self.deadline = deadline
        self.retain_graph = False
        self.create_graph = False
        self.ledger: Ledger | None = None
        self.run: int | None = None
        self._state = PassState(id)
        self._changed = threading.Condition()
        self._inbox: dict[EdgeId, Settlement] = {}
        self._awaited: set[EdgeId] = set()
        self._run_over = False
        self._error: Exception | None = None

    @property
    def asked(self) -> frozenset[WorkerId]:
        """The workers the root told to run."""
        return self._state.asked

    @property
    def error(self) -> Exception | None:
        """What ended the pass, if something did."""
        return self._error

    def workers_asked(self, workers: list[WorkerId]) -> None:
        """The root is about to tell these."""
        with self._changed:
            self._state.workers_asked(workers)

    def edges_expected(self, edges: dict[EdgeId, WorkerId]) -> None:
        """The run here is about to wait for these, each from a worker."""
        with self._changed:
            self._state.edges_expected(edges)

    def settle(self, edge: EdgeId, settlement: Settlement) -> None:
        """An edge's gradients came. A second time ends the pass: one of the two would be lost."""
        with self._changed:
            try:
                self._state.edge_settled(edge)
            except BadMessage as error:
                self._fail(error)
            else:
                self._inbox[edge] = settlement
            self._changed.notify_all()

    def has_come(self, edge: EdgeId) -> bool:
        """Whether an edge is settled, or never will be."""
        with self._changed:
            return self._error is not None or self._state.is_settled(edge)

    def await_edge(self, edge: EdgeId) -> None:
        """Block until it has come."""
        with self._changed:
            self._awaited.add(edge)
            self._changed.wait_for(lambda: self.has_come(edge))
            self._awaited.discard(edge)

    def collect(self, edge: EdgeId) -> Settlement:
        """The gradients of an edge that has come, or raise what ended the pass."""
        with self._changed:
            if self._error is not None:
                raise fresh(self._error)
            self._state.edge_collected(edge)
            return self._inbox.pop(edge)

    def worker_done(self, worker: WorkerId) -> None:
        """At the root: one worker's run is over."""
        with self._changed:
            self._state.worker_done(worker)
            self._changed.notify_all()

    def run_begins(self, ledger: Ledger) -> None:
        """Here, the engine is about to run; raises what has already ended the pass."""
        with self._changed:
            if self._error is not None:
                raise fresh(self._error)
            self.ledger = ledger

    def run_over(self) -> bool:
        """Here, the engine has returned, well or not. Whether the pass has failed meanwhile."""
        with self._changed:
            self._run_over = True
            self._changed.notify_all()
            return self._error is not None

    def wait_for_run(self, seconds: float) -> bool:
        """Wait until the engine has returned here, if it began; a failed pass wakes its waits.

        Not so a user's own backward that takes its time: False if it is not over by then. The run
        puts back what it did itself when it ends.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._run_over or self.ledger is None, seconds)

    def unfinished(self) -> list[WorkerId]:
        """At the root: those that are not done; none if the pass has failed."""
        with self._changed:
            return [] if self._error is not None else self._state.unfinished()

    def await_workers(self) -> None:
        """At the root: block until everyone is done, or the pass has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self.unfinished())

    def check_failed(self) -> None:
        """Raise what ended the pass, if something did."""
        if self._error is not None:
            raise fresh(self._error)

    def check_collected(self) -> None:
        """After a run: whatever was settled here was also used here."""
        with self._changed:
            left = self._state.uncollected()
        if left:
            edges = ", ".join(map(str, left))
            raise BadMessage(f"{edges} got gradients in {self.id} that no send waited for")

    def fail(self, error: Exception) -> None:
        """End the pass here; the first error is kept."""
        with self._changed:
            self._fail(error)
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        if self._state.pass_failed():
            self._error = error

    def peer_lost(self, worker: WorkerId, error: Exception) -> None:
        """A worker is gone; fails the pass if it cannot end well without it."""
        with self._changed:
            concerned = self._state.concerns(worker)
        if concerned:
            self.fail(error)

    def expire(self, seconds: float, name: str) -> None:
        """The deadline is over."""
        with self._changed:
            edges = ", ".join(map(str, sorted(self._awaited)))
            workers = ", ".join(f"w{worker}" for worker in self._state.unfinished())
        waited = f"; it waits for the gradients of {edges}" if edges else ""
        unfinished = f"; not done: {workers}" if workers else ""
        self.fail(
            BackwardTimeout(
                f"{self.id} of {self.context} was given up on {name} "
                f"after {seconds:.3g} s{waited}{unfinished}",
                hint="a longer Timeouts(backward=…) waits longer; a loss made by a thread that "
                "received none of the tensors it uses may wait in the wrong order: make it in the "
                "thread that received them, or call backward(context_id, [loss])",
            )
        )
