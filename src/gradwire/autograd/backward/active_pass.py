"""One backward pass while it is active on one worker.

`ActivePass` is what every worker of the pass knows: the gradients that have arrived, and the
threads that wait for them. `CoordinatedPass` adds what the worker knows on which the pass began;
`ParticipantPass` what every other worker knows. They decide by a `PassState` under the worker's
lock and act outside it. They wait without a timeout of their own: the pass table's timer fails a
pass at its deadline, and a failure wakes every wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Promise
from gradwire.agent.requests.timer import Clock, explain_shortening
from gradwire.agent.serving.dispatch import Payload
from gradwire.autograd.backward.pass_state import PassState
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.lineage import NOTHING, Lineage, numbers
from gradwire.autograd.messages import Gradients, Start
from gradwire.autograd.undo.nested_pass import Nested
from gradwire.autograd.undo.undo_log import UndoLog
from gradwire.errors import BackwardTimeout, BadMessage
from gradwire.ids import EdgeId, PassId, WorkerId
from gradwire.wire.message import Buffer

Settlement = tuple[Gradients, Payload, WorkerId]
"""What has settled an edge, and who sent it. Decoded by the Send, on the thread and stream that use
it."""


class ActivePass:
    """What every worker knows of a pass it takes part in."""

    context: Context | None = None
    """whose map the gradients of leaves go to, if they go to one"""
    mine = NOTHING
    """the edges of this worker that others settle in the pass"""
    run: int | None = None
    """the number of the engine run here, once it is known"""
    is_partial = False
    """whether it began here and goes only to some inputs: a grad(), or a backward with `inputs=`"""
    not_started: Sequence[WorkerId] = ()
    """the participants to which no Start was sent yet from here"""
    error: Exception | None = None
    """the first error, which has ended the pass"""
    _news: Promise[None] | None = None
    # Made by the first thread that sleeps. Most passes need none: a thread that waits for gradients
    # reads the channel itself.
    _changed: threading.Condition | None = None

    def __init__(
        self,
        id: PassId,
        deadline: float,
        began: float,
        edges: Edges,
        participants: Iterable[WorkerId] = (),
    ) -> None:
        self.id, self.deadline, self.began = id, deadline, began
        self._table, self._lock = edges, edges.lock
        self.edges_sent: set[EdgeId] = set()
        """the edges whose gradients have left, or are about to; see `engine_run.check_order`"""
        self._state = PassState(id, participants)
        self.participants = self._state.asked
        """the workers that are told to run from here"""
        self.settled = self._state.settled
        """the edges whose gradients have arrived"""
        self.inbox: dict[EdgeId, Settlement] = {}
        """the gradients that no Send has taken yet"""
        self._awaited: set[EdgeId] = set()

    def __str__(self) -> str:
        return str(self.id) if self.context is None else f"{self.id} of {self.context}"

    def seconds_left(self, clock: Clock) -> float:
        """The time until its deadline."""
        return self.deadline - clock.now()

    def settle(self, message: Gradients, payload: Payload, sender: WorkerId) -> bool:
        """Settle an edge. If its gradients came before, the pass fails: False."""
        try:
            with self._lock:
                self._state.edge_settled(message.edge)
                self.inbox[message.edge] = message, payload, sender
                if self._changed is not None:
                    self._changed.notify_all()
        except BadMessage as error:
            self.fail(error)
            return False
        if self._news is not None:
            self._news.settle(None)
        return True

    def has_come(self, edge: EdgeId) -> bool:
        """Whether an edge is settled, or never will be."""
        # Without the lock: both are written before the threads that wait are notified.
        return self.error is not None or edge in self.settled

    def await_edge(self, edge: EdgeId) -> None:
        """Block until the edge is settled or the pass has failed."""
        with self._lock:
            self._awaited.add(edge)
            try:
                self.sleep_until(lambda: self.has_come(edge))
            finally:
                self._awaited.discard(edge)

    def take_gradients(self, edge: EdgeId) -> Settlement:
        """The gradients of a settled edge; raises what ended the pass."""
        with self._lock:
            if self.error is not None:
                raise fresh(self.error)
            self._state.edge_collected(edge)
            return self.inbox.pop(edge)

    def check_collected(self) -> None:
        """After a run: BadMessage if gradients arrived that no Send has used."""
        if self._state.to_collect:
            with self._lock:
                edges = ", ".join(map(str, sorted(self._state.to_collect)))
            raise BadMessage(f"{edges} got gradients in {self.id} that no send waited for")

    def fail(self, error: Exception) -> None:
        """End the pass here; the first error is kept."""
        with self._lock:
            if self.error is None:
                self.error = error
            if self._changed is not None:
                self._changed.notify_all()
        if self._news is not None:
            self._news.settle(None)

    def on_news(self, act: Callable[[], object]) -> None:
        """Call this, without the lock, once gradients have arrived or the pass has failed."""
        news = self._news = Promise()
        news.on_settled(lambda _: act())
        # They write what is looked at here before they look for the promise: one sees the other.
        if self.has_news():
            news.settle(None)

    def has_news(self) -> bool:
        """Whether gradients have arrived or the pass has failed."""
        return self.error is not None or bool(self.settled)

    def peer_lost(self, worker: WorkerId, error: Exception) -> None:
        """Fail the pass if it cannot succeed without this worker."""
        mine = [self._table.sent.get(n) for n in numbers(self.mine)]
        edges = [sent.edge for sent in mine if sent is not None and sent.peer == worker]
        with self._lock:
            # Gradients that are due from this worker may be lost with its connection.
            is_due = any(edge not in self.settled for edge in edges)
            concerned = is_due or self._state.concerns(worker)
        if concerned:
            self.fail(error)

    def worker_done(self, worker: WorkerId, *, has_changed: bool) -> None:
        """A participant's run is over; BadMessage if it was not told to run from here."""
        with self._lock:
            self._state.worker_done(worker, has_changed=has_changed)
            if self._changed is not None:
                self._changed.notify_all()

    def waits_for(self) -> tuple[list[EdgeId], list[WorkerId]]:
        """The edges whose gradients a thread here sleeps for, and the workers that are not done."""
        with self._lock:
            return sorted(self._awaited), self._state.unfinished()

    def expire(self, directory: Directory) -> None:
        """Fail the pass because its deadline is over."""
        awaited, not_done = self.waits_for()
        edges, workers = ", ".join(map(str, awaited)), ", ".join(map(directory.name, not_done))
        waited = f"; it waits for the gradients of {edges}" if edges else ""
        unfinished = f"; not done: {workers}" if workers else ""
        seconds = self.deadline - self.began
        error = BackwardTimeout(
            f"{self} was given up on {directory.me.name} "
            f"after {seconds:.3g} s{explain_shortening(self.deadline)}{waited}{unfinished}",
            hint="a longer Timeouts(backward=…) waits longer",
        )
        self.fail(error.about(workers, phase="backward"))

    def sleep_until(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Block until `done` returns true after a change; False if it has not by then."""
        with self._lock:
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            return self._changed.wait_for(done, seconds)


@final
class CoordinatedPass(ActivePass):
    """A pass on the worker where it began."""

    start: Callable[..., Start]
    """what to send to a participant, given its edges, the time left and the first gradients"""

    is_finishing = False
    """whether the run here is over, and only the participants are waited for"""
    outer: list[Nested] | None = None
    """the nested passes of the outer backward, if there is one"""

    watch_rest: Callable[[], None] | None = None
    """logs changes to the leaves behind Sends: called by the first Send, while gradients come"""

    def __init__(
        self,
        id: PassId,
        deadline: float,
        began: float,
        table: Edges,
        edges: dict[WorkerId, Lineage],
    ) -> None:
        # Every other worker that owns a Send of the pass takes part in it.
        super().__init__(id, deadline, began, table, edges)
        self.edges = edges
        """of each participant: those of the pass that it has sent"""
        self.unfinished, self.changed = self._state.unfinished, self._state.changed
        self.not_started = sorted(self.participants)

    def take_not_started(self) -> Sequence[WorkerId]:
        """The participants for the caller to send a Start to."""
        with self._lock:
            workers, self.not_started = self.not_started, ()
            return workers

    def is_through(self, worker: WorkerId) -> bool:
        """Whether a participant is done, or the pass has failed."""
        return self.error is not None or worker not in self._state.waiting_for


@final
class ParticipantPass(ActivePass):
    """A pass on a worker that takes part in it. `undo_log` is None until the run has begun."""

    undo_log: UndoLog | None = None
    held: tuple[Gradients, Sequence[Buffer]] | None = None
    """the last gradients of the run, held back until the engine has returned"""
    _leaves, _run_over, is_started = 0, False, False

    def starts(self) -> bool:
        """A Start has come; whether it is the first."""
        with self._lock:
            is_first, self.is_started = not self.is_started, True
        return is_first

    def run_begins(self, undo_log: UndoLog) -> None:
        """The engine is about to run; raises what has already ended the pass."""
        with self._lock:
            if self.error is not None:
                raise fresh(self.error)
            self.undo_log = undo_log

    def run_counted(self, sends: int, recvs: int, leaves: int) -> None:
        """The run reaches this many Sends, Recvs and leaves."""
        # Without the lock, as in `is_last`: only the thread that runs the engine counts.
        self._state.run_counted(sends, recvs)
        self._leaves = leaves

    def is_last(self) -> bool:
        """A Recv runs: whether nothing is left to run after it."""
        if not self._state.recv_through() or self.undo_log is None:
            return False
        return len(self.undo_log.entries) - self.undo_log.inner == self._leaves

    def run_over(self) -> bool:
        """The engine has returned or raised. Whether the pass has failed meanwhile."""
        with self._lock:
            self._run_over = True
            if self._changed is not None:
                self._changed.notify_all()
            return self.error is not None

    def is_running(self) -> bool:
        """Whether the engine runs here."""
        return self.undo_log is not None and not self._run_over

    def wait_for_run(self, seconds: float) -> bool:
        """Wait until the engine has returned here, if it began; False if it has not by then."""
        # A failed pass wakes the run's own waits, but not a user's backward that takes long. Such
        # a run reverts its changes itself when it ends.
        return self.sleep_until(lambda: self._run_over or self.undo_log is None, seconds)


AnyPass = CoordinatedPass | ParticipantPass
"""An active pass, in the role that this worker has in it."""
