"""The passes under way on one worker: found by their id, or by the engine run that executes a node.

Note [Which pass a node runs for]: passes of one context may follow each other, run at once from
several threads, or nest. The number of the current engine run tells them apart. A native backward
is entered here by the first crossing it meets; a run that we start enters itself, before it does
anything else (engine_run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.timer import Clock, Timer
from gradwire.autograd.backward import engine_run as runs
from gradwire.autograd.backward.active_pass import ActivePass, Plan
from gradwire.autograd.graph.context import Context
from gradwire.errors import ContextClosed, OverLimit, PeerLost
from gradwire.ids import ContextId, PassId, WorkerId, first_of
from gradwire.options import Timeout


@final
class PassTable:
    """See the top of this file."""

    def __init__(
        self,
        directory: Directory,
        due: Callable[[Timeout], float],
        seconds: float,
        clock: Clock,
        timer: Timer,
        most: int,
    ) -> None:
        self._directory, self.due, self._seconds = directory, due, seconds
        self._me = directory.me.id
        self._clock, self._timer, self._most = clock, timer, most
        self._lock = directory.lock
        self._count = first_of(directory.myself.life)
        self._by_id: dict[tuple[ContextId, PassId], ActivePass] = {}
        self._by_run: dict[int, ActivePass] = {}
        timer.watch(self._expire)

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(self, context: Context, run: int, plan: Plan, timeout: Timeout) -> ActivePass:
        """A pass begins here in an engine run, and is given up after so many seconds."""
        deadline, now = self.due(timeout), self._clock.now()
        with self._lock:
            self._count += 1
            id = PassId(self._me, self._count)
            running = ActivePass(id, context, deadline, now, run, plan)
            self._by_id[context.id, id] = self._by_run[run] = running
        self._timer.need(deadline)
        return running

    def heard_of(
        self, context: Context, id: PassId, deadline: float | None = None
    ) -> ActivePass | None:
        """A peer speaks of this pass: the one we know, or a new one; None if it is over.

        New ones come into being here, as gradients may overtake the Start, which says its deadline.
        """
        running = self._by_id.get((context.id, id)) or self._maybe_new(context, id, deadline)
        if running is not None and deadline is not None and running.deadline != deadline:
            running.deadline = deadline
            self._timer.need(deadline)
        return running

    def _maybe_new(self, context: Context, id: PassId, deadline: float | None) -> ActivePass | None:
        now = self._clock.now()
        due = now + self._seconds if deadline is None else deadline
        with self._lock:
            if id in context.ended:
                return None
            running = self._by_id.get((context.id, id))
            if running is None:
                self._count_one(context)
                running = self._by_id[context.id, id] = ActivePass(id, context, due, now)
        self._timer.need(due)
        return running

    def _count_one(self, context: Context) -> None:
        """Each leaves a number behind until the context closes: so many and no more."""
        if context.passes >= self._most:
            raise OverLimit(
                f"{context} has had {self._most} backward passes here, which is the limit",
                hint="begin a new context now and then, or raise Limits(passes=…)",
            )
        context.passes += 1

    def maybe(self, context: ContextId, id: PassId) -> ActivePass | None:
        """The pass, if it is under way here."""
        return self._by_id.get((context, id))

    def enter(self, running: ActivePass, run: int) -> None:
        """From now on the nodes of this engine run belong to this pass, if it is not over."""
        with self._lock:
            if running.id in running.context.ended:
                raise running.error or ContextClosed(f"{running.id} of {running.context} is over")
            running.run = run
            self._by_run[run] = running

    def of_run(self, run: int) -> ActivePass | None:
        """The pass that an engine run belongs to."""
        running = self._by_run.get(run)
        if running is None and runs.enter_if_begun():
            running = self._by_run.get(run)
        return running

    def over(self, running: ActivePass) -> None:
        """It has ended here; what still comes for it is late."""
        with self._lock:
            running.context.ended.add(running.id)
            self._by_id.pop((running.context.id, running.id), None)
            if running.run is not None:
                self._by_run.pop(running.run, None)

    def in_context(self, context: ContextId) -> list[ActivePass]:
        """The passes of one context."""
        if not self._by_id:
            return []
        with self._lock:
            return [running for (id, _), running in self._by_id.items() if id == context]

    def rooted_at(self, worker: WorkerId) -> list[ActivePass]:
        """The passes that began on a worker."""
        return [running for running in self.all() if running.id.worker == worker]

    def peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        """Fail the passes that cannot end well without this worker."""
        for running in self.all():
            lost = PeerLost(f"{error.message}, in the middle of {running.id} of {running.context}")
            running.peer_lost(worker, lost.about(error.peer, link=error.link, phase="backward"))

    def all(self) -> list[ActivePass]:
        """Every one."""
        with self._lock:
            return list(self._by_id.values())

    def _expire(self, now: float) -> float | None:
        waiting = []
        for running in self.all():
            if running.deadline <= now:
                running.expire(self._directory)
            else:
                waiting.append(running.deadline)
        return min(waiting, default=None)
