"""One pass while it runs on one worker: gradients that came, threads that wait for them.

The driver around `PassState`: one condition, decided under it, acted outside it. It waits without
a timeout of its own; the engine's timer fails a pass whose deadline is over, which wakes every
wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import final

import msgspec
import torch

from gradwire.agent.peers.directory import Directory
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.timer import explain_cut
from gradwire.autograd.backward.pass_state import PassState
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.lineage import Lineage, numbers
from gradwire.autograd.messages import Crossing, Gradients
from gradwire.autograd.undo.nested_pass import Inside
from gradwire.autograd.undo.undo_log import UndoLog
from gradwire.errors import BackwardTimeout, BadMessage, GradwireError
from gradwire.ids import EdgeId, PassId, WorkerId
from gradwire.options import Limits
from gradwire.wire.frame import Buffer
from gradwire.wire.tensor import decode_tensors


class Settlement(msgspec.Struct, frozen=True):
    """What an edge was settled with."""

    gradients: list[torch.Tensor | None]
    crossings: list[Crossing]


class Plan(msgspec.Struct, frozen=True):
    """What the root has decided about a pass: what each of its workers is told to do."""

    edges: Lineage
    needed: int | None
    destination: int
    retain_graph: bool
    create_graph: bool
    asked: Sequence[WorkerId]
    """the workers that are told"""
    anomaly: int = 0
    checkpoints: bool = True
    """whether reentrant checkpoints may run"""


NO_STOPS: frozenset[EdgeId] = frozenset()


class Held(msgspec.Struct, frozen=True):
    """Gradients that leave when the run is over, as they are the last thing it does."""

    message: Gradients
    payload: Sequence[Buffer]


@final
class ActivePass:
    """See the top of this file. `undo_log` is None until the run here has begun.

    `plan` is the root's; the workers it asks are told later, see `take_untold`.
    """

    def __init__(
        self,
        id: PassId,
        context: Context,
        deadline: float,
        began: float,
        run: int | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.id = id
        self.context = context
        self.deadline, self._began = deadline, began
        self.mine = 0
        """the edges of this worker that others settle in the pass, as a bitset"""
        self.undo_log: UndoLog | None = None
        self.run, self.plan = run, plan
        self.around: UndoLog | Inside | None = None
        """at the root: the backward inside which this one runs, if it does; see undo/nested_pass.py
        """
        self.stops = NO_STOPS
        """at the root: the edges of the Recvs behind which the pass has nothing to run"""
        self.shipped: set[EdgeId] = set()
        """the edges whose gradients have left, or are about to; see graph/ordering.py"""
        self.held: Held | None = None
        self.error: Exception | None = None
        """what ended the pass, if something did"""
        self.untold: Sequence[WorkerId] = () if plan is None else plan.asked
        self._state = PassState(id, self.untold)
        self._lock = context.lock
        self._changed: threading.Condition | None = None
        """made by the first who sleeps: mostly nobody does, as who waits reads the channel"""
        self._inbox: dict[EdgeId, Settlement] = {}
        self._awaited: set[EdgeId] = set()
        self._leaves = 0
        self._run_over = False
        self._start = [None]
        """taken by the first Start"""
        self._parked: Callable[[], object] | None = None

    @property
    def asked(self) -> frozenset[WorkerId]:
        """The workers the root told to run."""
        return self._state.asked

    def take_untold(self) -> Sequence[WorkerId]:
        """At the root: those who are yet to be told to run. Whoever takes them tells them.

        hot: asked by every crossing of a backward
        """
        if not self.untold:
            return ()
        with self._lock:
            untold, self.untold = self.untold, ()
            return untold

    def settle_with(self, message: Gradients, payload: memoryview | None, limits: Limits) -> None:
        """An edge's gradients came, as they travel."""
        present = message.present
        try:
            came = decode_tensors(message.tensors, payload, limits)
            gradients: list[torch.Tensor | None] = [*came]
            if False in present or len(came) != len(present):
                left = iter(came)
                gradients = [next(left) if there else None for there in present]
        except (GradwireError, StopIteration) as error:
            self.fail(BadMessage(f"the gradients of {message.edge} do not decode: {error}"))
            return
        self.settle(message.edge, Settlement(gradients, message.crossings))

    def start_came(self) -> None:
        """The root has told this worker to run. A second run would have books that nobody ends."""
        try:
            self._start.pop()  # one step for the interpreter
        except IndexError:
            raise BadMessage(f"{self.id} was begun twice") from None

    def park(self, begin: Callable[[], object]) -> bool:
        """Call this when the first gradients have come, or the pass has failed; False if it is so.

        Then it is not called.
        """
        with self._lock:
            if self.error is not None or self._state.settled:
                return False
            self._parked = begin
            return True

    def _unpark(self) -> None:
        """Without the lock: it takes the thread that settles or fails the pass."""
        with self._lock:
            begin, self._parked = self._parked, None
        if begin is not None:
            begin()

    def settle(self, edge: EdgeId, settlement: Settlement) -> None:
        """An edge's gradients came. A second time ends the pass: one of the two would be lost."""
        with self._lock:
            try:
                self._state.edge_settled(edge)
            except BadMessage as error:
                self._fail(error)
            else:
                self._inbox[edge] = settlement
            if self._changed is not None:
                self._changed.notify_all()
        if self._parked is not None:
            self._unpark()

    def has_come(self, edge: EdgeId) -> bool:
        """Whether an edge is settled, or never will be."""
        return self.error is not None or edge in self._state.settled

    def await_edge(self, edge: EdgeId) -> None:
        """Block until it has come."""
        with self._lock:
            self._awaited.add(edge)
            try:
                self._sleep_until(lambda: self.has_come(edge))
            finally:
                self._awaited.discard(edge)

    def collect(self, edge: EdgeId) -> Settlement:
        """The gradients of an edge that has come, or raise what ended the pass."""
        with self._lock:
            if self.error is not None:
                raise fresh(self.error)
            self._state.edge_collected(edge)
            return self._inbox.pop(edge)

    def worker_done(self, worker: WorkerId, *, has_changed: bool) -> None:
        """At the root: one worker's run is over."""
        with self._lock:
            self._state.worker_done(worker, has_changed=has_changed)
            if self._changed is not None:
                self._changed.notify_all()

    def changed_workers(self) -> Sequence[WorkerId]:
        """At the root, when all are done: those that have changed leaves."""
        changed = self._state.changed
        return sorted(changed) if changed else ()

    def run_counted(self, sends: int, recvs: int, leaves: int) -> None:
        """Here, a run begins that reaches so many Sends, Recvs and leaves.

        Without the lock, as in `is_last`: only the thread that runs counts.
        """
        self._state.run_counted(sends, recvs)
        self._leaves = leaves

    def is_last(self) -> bool:
        """Here, a Recv runs: whether nothing is left to run after it."""
        if not self._state.recv_through() or self.undo_log is None:
            return False
        return len(self.undo_log.entries) - self.undo_log.inner == self._leaves

    def run_begins(self, undo_log: UndoLog) -> None:
        """Here, the engine is about to run; raises what has already ended the pass."""
        with self._lock:
            if self.error is not None:
                raise fresh(self.error)
            self.undo_log = undo_log

    def run_over(self) -> bool:
        """Here, the engine has returned, well or not. Whether the pass has failed meanwhile."""
        with self._lock:
            self._run_over = True
            if self._changed is not None:
                self._changed.notify_all()
            return self.error is not None

    def is_running(self) -> bool:
        """Whether the engine runs here."""
        return self.undo_log is not None and not self._run_over

    def wait_for_run(self, seconds: float) -> bool:
        """Wait until the engine has returned here, if it began; a failed pass wakes its waits.

        Not so a user's own backward that takes its time: False if it is not over by then. The run
        puts back what it did itself when it ends.
        """
        with self._lock:
            return self._sleep_until(lambda: self._run_over or self.undo_log is None, seconds)

    def unfinished(self) -> Sequence[WorkerId]:
        """At the root: those that are not done; none if the pass has failed."""
        if self.error is not None or not self._state.waiting_for:
            return ()
        with self._lock:
            return self._state.unfinished()

    def is_through(self, worker: WorkerId) -> bool:
        """At the root: whether a worker is done, or need not be any more."""
        return self.error is not None or worker not in self._state.waiting_for

    def await_worker(self, worker: WorkerId) -> None:
        """At the root: block until it is through."""
        with self._lock:
            self._sleep_until(lambda: self.is_through(worker))

    def check_collected(self) -> None:
        """After a run: whatever was settled here was also used here."""
        if not self._state.to_collect:
            return
        with self._lock:
            left = sorted(self._state.to_collect)
        edges = ", ".join(map(str, left))
        raise BadMessage(f"{edges} got gradients in {self.id} that no send waited for")

    def fail(self, error: Exception) -> None:
        """End the pass here; the first error is kept."""
        with self._lock:
            self._fail(error)
            if self._changed is not None:
                self._changed.notify_all()
        if self._parked is not None:
            self._unpark()

    def _sleep_until(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """With the lock held: wait until it is so, as seen after each change."""
        if self._changed is None:
            self._changed = threading.Condition(self._lock)
        return self._changed.wait_for(done, seconds)

    def _fail(self, error: Exception) -> None:
        if self._state.pass_failed():
            self.error = error

    def peer_lost(self, worker: WorkerId, error: Exception) -> None:
        """A worker is gone; fails the pass if it cannot end well without it."""
        with self._lock:
            concerned = self._state.concerns(worker)
        if concerned or self._awaits(worker):
            self.fail(error)

    def _awaits(self, worker: WorkerId) -> bool:
        """Whether gradients from this worker are to come: they may be lost with its link."""
        mine = [self.context.sent[n] for n in numbers(self.mine)]
        edges = [sent.edge for sent in mine if sent is not None and sent.peer == worker]
        with self._lock:
            return any(edge not in self._state.settled for edge in edges)

    def expire(self, directory: Directory) -> None:
        """The deadline is over."""
        with self._lock:
            edges = ", ".join(map(str, sorted(self._awaited)))
            workers = ", ".join(map(directory.name, self._state.unfinished()))
        waited = f"; it waits for the gradients of {edges}" if edges else ""
        unfinished = f"; not done: {workers}" if workers else ""
        seconds = self.deadline - self._began
        error = BackwardTimeout(
            f"{self.id} of {self.context} was given up on {directory.me.name} "
            f"after {seconds:.3g} s{explain_cut(self.deadline)}{waited}{unfinished}",
            hint="a longer Timeouts(backward=…) waits longer",
        )
        self.fail(error.about(workers, phase="backward"))
