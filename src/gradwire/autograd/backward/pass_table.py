"""The passes that are active on one worker.

Note [Which pass a node runs for]: passes of one context may follow each other, run at once from
several threads, or nest. The number of the current engine run tells them apart. A native backward
is entered in this table by the first crossing it meets. A run that gradwire starts enters itself,
before it does anything else (engine_run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwire.agent.agent import Agent
from gradwire.autograd.backward.active_pass import AnyPass, CoordinatedPass, ParticipantPass
from gradwire.autograd.backward.engine_run import enter_if_begun
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.walk import Lineage
from gradwire.errors import ContextClosed, OverLimit, PeerLost
from gradwire.ids import ContextId, PassId, WorkerId, first_of
from gradwire.options import Timeout


@final
class PassTable:
    """The active passes of one worker, by id and by engine run."""

    def __init__(self, agent: Agent, due: Callable[[Timeout], float], seconds: float) -> None:
        self._directory, self.due, self._seconds = agent.directory, due, seconds
        self._clock, self._timer, self._most = agent.clock, agent.timer, agent.limits.passes
        self._lock = agent.directory.lock
        self._count = first_of(agent.directory.myself.incarnation)
        self._by_id: dict[tuple[ContextId, PassId], AnyPass] = {}
        self._by_run: dict[int, AnyPass] = {}
        agent.timer.watch(self._expire)

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(
        self, context: Context, run: int, edges: Lineage, timeout: Timeout
    ) -> CoordinatedPass:
        """Add a pass that begins here, in this engine run."""
        deadline, now = self.due(timeout), self._clock.now()
        with self._lock:
            self._count += 1
            id = PassId(self._directory.me.id, self._count)
            active = CoordinatedPass(id, context, deadline, now, run, edges)
            self._by_id[context.id, id] = self._by_run[run] = active
        self._timer.need(deadline)
        return active

    def heard_of(
        self, context: Context, id: PassId, deadline: float | None = None
    ) -> AnyPass | None:
        """The pass that a peer's message names, added if it is new; None if it is over.

        Gradients may overtake the Start, which carries the deadline, so either may add the pass.
        """
        active = self._by_id.get((context.id, id)) or self._maybe_new(context, id, deadline)
        if active is not None and deadline is not None and active.deadline != deadline:
            active.deadline = deadline
            self._timer.need(deadline)
        return active

    def _maybe_new(self, context: Context, id: PassId, deadline: float | None) -> AnyPass | None:
        now = self._clock.now()
        due = now + self._seconds if deadline is None else deadline
        with self._lock:
            if id in context.ended:
                return None
            active = self._by_id.get((context.id, id))
            if active is None:
                # Each pass leaves its id in `ended` until the context closes, hence the limit.
                if context.passes >= self._most:
                    raise OverLimit(
                        f"{context} has had {self._most} backward passes here, which is the limit",
                        hint="begin a new context now and then, or raise Limits(passes=…)",
                    )
                context.passes += 1
                active = self._by_id[context.id, id] = ParticipantPass(id, context, due, now)
        self._timer.need(due)
        return active

    def maybe(self, context: ContextId, id: PassId) -> AnyPass | None:
        """The pass, if it is active here."""
        return self._by_id.get((context, id))

    def enter(self, active: AnyPass, run: int) -> None:
        """From now on the nodes of this engine run belong to this pass, unless it is over."""
        with self._lock:
            if active.id in active.context.ended:
                raise active.error or ContextClosed(f"{active.id} of {active.context} is over")
            active.run = run
            self._by_run[run] = active

    def of_run(self, run: int) -> AnyPass | None:
        """The pass that an engine run belongs to."""
        active = self._by_run.get(run)
        if active is None and enter_if_begun():
            active = self._by_run.get(run)
        return active

    def over(self, active: AnyPass) -> None:
        """Remove a pass that has ended here; messages that still arrive for it are late."""
        with self._lock:
            active.context.ended.add(active.id)
            self._by_id.pop((active.context.id, active.id), None)
            if active.run is not None:
                self._by_run.pop(active.run, None)

    def in_context(self, context: ContextId) -> list[AnyPass]:
        """The passes of one context."""
        if not self._by_id:
            return []
        with self._lock:
            return [active for (id, _), active in self._by_id.items() if id == context]

    def coordinated_by(self, worker: WorkerId) -> list[ParticipantPass]:
        """The passes in which this worker takes part and which began on that one."""
        passes = [active for active in self.all() if isinstance(active, ParticipantPass)]
        return [active for active in passes if active.id.worker == worker]

    def peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        """Fail the passes that cannot succeed without this worker."""
        for active in self.all():
            lost = PeerLost(f"{error.message}, in the middle of {active.id} of {active.context}")
            active.peer_lost(worker, lost.about(error.peer, link=error.link, phase="backward"))

    def all(self) -> list[AnyPass]:
        """Every active pass."""
        with self._lock:
            return list(self._by_id.values())

    def _expire(self, now: float) -> float | None:
        waiting = []
        for active in self.all():
            if active.deadline <= now:
                active.expire(self._directory)
            else:
                waiting.append(active.deadline)
        return min(waiting, default=None)
