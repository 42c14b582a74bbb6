"""The passes that are active on one worker, and which passes of other workers may run here.

Note [Which pass a node runs for]: passes of one context may follow each other, run at once from
several threads, or nest. The number of the current engine run tells them apart. A native backward
is entered in this table by the first crossing it meets. A run that gradwire starts enters itself,
before it does anything else (engine_run.py).

Note [Who may have us run]: the numbers of contexts and edges can be guessed, so any member can send
a Start for a graph in which it has no part. Its run would use up the graph, or occupy a thread
while it waits for gradients that nobody sends. This worker cannot know everyone who takes part: the
peer to which it sent a tensor may have passed the result on. But the gradients of an edge come only
from the worker to which that edge leads. So a Start from a worker that is not known in the context
waits, without a thread, for the first gradients of its pass. In a correct pass they come, worker by
worker, along the edges that lead to the coordinator, and before they come a run could do nothing
but wait. If no edge leads to the coordinator they never come, and the deadline ends the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.timer import Clock, Timer
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.autograd.backward.active_pass import (
    AnyPass,
    CoordinatedPass,
    ParticipantPass,
    Plan,
)
from gradwire.autograd.backward.engine_run import enter_if_begun
from gradwire.autograd.graph.context import Context
from gradwire.errors import ContextClosed, OverLimit, PeerLost
from gradwire.ids import ContextId, PassId, WorkerId, first_of, opener_of
from gradwire.options import Timeout


@final
class PassTable:
    """The active passes of one worker, by id and by engine run."""

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
        self._by_id: dict[tuple[ContextId, PassId], AnyPass] = {}
        self._by_run: dict[int, AnyPass] = {}
        timer.watch(self._expire)

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(self, context: Context, run: int, plan: Plan, timeout: Timeout) -> CoordinatedPass:
        """Add a pass that begins here, in this engine run."""
        deadline, now = self.due(timeout), self._clock.now()
        with self._lock:
            self._count += 1
            id = PassId(self._me, self._count)
            active = CoordinatedPass(id, context, deadline, now, run, plan)
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
                self._count_one(context)
                active = self._by_id[context.id, id] = ParticipantPass(id, context, due, now)
        self._timer.need(due)
        return active

    def _count_one(self, context: Context) -> None:
        """Each pass leaves its id in `ended` until the context closes, hence the limit."""
        if context.passes >= self._most:
            raise OverLimit(
                f"{context} has had {self._most} backward passes here, which is the limit",
                hint="begin a new context now and then, or raise Limits(passes=…)",
            )
        context.passes += 1

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


Run = Callable[[], bool]
"""Takes part in a pass. True if the pass was parked instead: then it still counts as a run."""
Failed = Callable[[BaseException], None]


@final
class Admission:
    """Limits how many passes each coordinator runs here, and for how long."""

    def __init__(self, agent: Agent, seconds: float) -> None:
        self._agent, self._seconds = agent, seconds
        self._runs = PeerLimit("runs", agent.limits.runs)

    def deadline(self, seconds: float) -> float:
        """When a pass fails here: its coordinator may ask for less time than we allow, not more."""
        return self._agent.clock.now() + min(seconds, self._seconds)

    def admit(self, coordinator: WorkerId, run: Run, failed: Failed) -> None:
        """Call `run`, unless this coordinator has reached its limit of runs here."""
        try:
            self._runs.take(coordinator)
        except OverLimit as error:
            self._agent.noting.note(coordinator, error)
            failed(error)
            return
        self._attempt(coordinator, run, failed)

    def _attempt(self, coordinator: WorkerId, run: Run, failed: Failed) -> None:
        is_parked = False
        try:
            is_parked = run()
        except BaseException as error:  # an error ends the pass everywhere
            failed(error)
        finally:
            if not is_parked:
                self._runs.give_back(coordinator)

    def is_known(self, context: Context, worker: WorkerId) -> bool:
        """Whether a worker is known to take part in this context.

        hot: each pass
        """
        return (
            worker == opener_of(context.id) or worker in context.callers or worker in context.called
        )

    def park(self, active: ParticipantPass, run: Run, failed: Failed) -> bool:
        """Call `run` later, see `ParticipantPass.park`; False if it may run now."""
        attempt = partial(self._attempt, active.id.worker, run, failed)
        return active.park(partial(self._agent.dispatch.service.submit, attempt))
