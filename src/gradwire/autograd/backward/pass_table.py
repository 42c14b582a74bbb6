"""The passes that are active on one worker.

Note [Which pass a node runs for]: passes may follow each other, run at once from several threads,
or nest. The number of the current engine run tells them apart. A native backward is entered here by
the first crossing it meets, a run that gradwire starts by its first node (engine_run.py).

Note [Passes that are over]: a message may arrive after its pass has ended here, and must not begin
it anew. A coordinator numbers its passes, and says with each Start which is the oldest that is not
over: of those before it nothing is heard any more. So what is remembered of each coordinator is
that number, and the few that have ended above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.devices.links import DeviceLinks
from gradwire.agent.serving.dispatch import Payload
from gradwire.autograd.backward.active_pass import AnyPass, CoordinatedPass, ParticipantPass
from gradwire.autograd.backward.engine_run import enter_if_begun
from gradwire.autograd.graph.context import Context
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.lineage import Lineage
from gradwire.autograd.messages import Gradients
from gradwire.errors import ContextClosed, OverLimit, PeerLost
from gradwire.ids import PassId, WorkerId, first_of
from gradwire.options import Timeout
from gradwire.wire.tensor import arrive_on_cpu


@final
class PassTable:
    """The active passes of one worker, by id and by engine run."""

    def __init__(
        self,
        agent: Agent,
        devices: DeviceLinks,
        edges: Edges,
        due: Callable[[Timeout], float],
        seconds: float,
    ) -> None:
        self._devices = devices
        self._directory, self._edges, self.due, self._seconds = agent.directory, edges, due, seconds
        self._clock, self._timer, self._most = agent.clock, agent.timer, agent.limits.passes
        self._me, self._lock = agent.directory.me.id, agent.directory.lock
        self._count = first_of(agent.directory.myself.incarnation)
        self._mine: dict[int, None] = {}
        """the numbers of the passes that began here and are not over, lowest first"""
        self._by_id: dict[PassId, AnyPass] = {}
        self.maybe = self._by_id.get
        """the pass, if it is active here"""
        self._by_run: dict[int, AnyPass] = {}
        self._floors: dict[WorkerId, int] = {}
        self._ended: dict[WorkerId, set[int]] = {}
        """by coordinator; see Note [Passes that are over]"""
        agent.timer.watch(self._expire)

    def __len__(self) -> int:
        return len(self._by_id)

    def begin(
        self, context: Context | None, run: int, edges: dict[WorkerId, Lineage], timeout: Timeout
    ) -> CoordinatedPass:
        """Add a pass that begins here, in this engine run."""
        deadline, now = self.due(timeout), self._clock.now()
        with self._lock:  # nothing is made in here that the collector counts, see docs/threads.md
            n = self._count = self._count + 1
            self._mine[n] = None
        try:
            id = PassId(self._me, n)
            active = CoordinatedPass(id, deadline, now, self._edges, edges)
            active.context, active.run = context, run
            self._by_id[id] = self._by_run[run] = active
        except BaseException:  # an interrupt, or one in a finalizer
            self._mine.pop(n, None)
            raise
        self._timer.need(deadline)
        return active

    @property
    def floor(self) -> int:
        """The oldest pass of this worker that is not over. See Note [Passes that are over]."""
        return min(self._mine)  # in one step: other threads begin and end passes

    def heard_of(
        self, id: PassId, deadline: float | None = None, floor: int | None = None
    ) -> AnyPass | None:
        """The pass that a peer's message names, added if it is new; None if it is over.

        Gradients may overtake the Start, which carries the deadline, so either may add the pass.
        """
        worker = id.worker
        if floor is not None and floor > self._floors.get(worker, 0):
            with self._lock:
                self._floors[worker] = floor
                ended = self._ended.get(worker)
                if ended and max(ended) < floor:  # most often
                    ended.clear()
                elif ended:
                    self._ended[worker] = {n for n in ended if n >= floor}
        active = self._by_id.get(id) or self._maybe_new(id, deadline)
        if active is not None and deadline is not None and active.deadline != deadline:
            active.deadline = deadline
            self._timer.need(deadline)
        return active

    def _maybe_new(self, id: PassId, deadline: float | None) -> AnyPass | None:
        now = self._clock.now()
        due = now + self._seconds if deadline is None else deadline
        known = len(self._by_id) + len(self._ended.get(id.worker, ()))
        if known >= self._most:  # of all coordinators
            known -= sum([other.worker != id.worker for other in tuple(self._by_id)])
        if known >= self._most:
            raise OverLimit(
                f"{self._most} backward passes of w{id.worker} are known here, which is the limit",
                hint="run fewer at once, or raise Limits(passes=…)",
            )
        made = ParticipantPass(id, due, now, self._edges)
        with self._lock:
            if self._is_over(id):
                return None
            active = self._by_id.setdefault(id, made)
        self._timer.need(due)
        return active

    def _is_over(self, id: PassId) -> bool:
        worker, n = id.worker, id.n
        if worker == self._me:  # begun here: else it is in the table
            return id not in self._by_id
        return n < self._floors.get(worker, 0) or n in self._ended.get(worker, ())

    def enter(self, active: AnyPass, run: int) -> None:
        """From now on the nodes of this engine run belong to this pass, unless it is over."""
        with self._lock:
            if self._by_id.get(active.id) is not active:
                raise active.error or ContextClosed(f"{active} is over")
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
        id = active.id
        with self._lock:
            self._by_id.pop(id, None)
            if active.run is not None:
                self._by_run.pop(active.run, None)
            if id.worker == self._me:
                self._mine.pop(id.n, None)
            elif id.n >= self._floors.get(id.worker, 0):
                self._ended.setdefault(id.worker, set()).add(id.n)
        self._edges.latest_depth = 0  # what is sent from now on is for the next pass
        self._drop_inbox(active)

    def settle(
        self, active: AnyPass, message: Gradients, payload: Payload, sender: WorkerId
    ) -> None:
        """Settle an edge of a pass; its Send takes the gradients, or they are dropped."""
        if not active.settle(message, payload, sender):
            self.drop(message, sender)
        elif self._by_id.get(active.id) is not active:
            # It has ended meanwhile, perhaps before they were in the inbox.
            self._drop_inbox(active)

    def _drop_inbox(self, active: AnyPass) -> None:
        while active.inbox:
            try:
                _, (message, _, sender) = active.inbox.popitem()  # one step: another may drop too
            except KeyError:
                return
            self.drop(message, sender)

    def withdraw(self, message: Gradients, to: WorkerId) -> None:
        """These gradients did not leave: forget the edges and the blocks they would have used."""
        if message.crossings:
            self._edges.withdraw([crossing.edge for crossing in message.crossings])
        if not arrive_on_cpu(message.tensors):
            self._devices.withdraw(message.tensors, to)

    def drop(self, message: Gradients, sender: WorkerId) -> None:
        """No Send takes these gradients: release the edges and the blocks that came with them."""
        if message.crossings:
            self._edges.unseen([crossing.edge for crossing in message.crossings], sender)
            self._timer.need(self._clock.now())  # the sender is told
        if not arrive_on_cpu(message.tensors):
            self._devices.drop(message.tensors, sender)

    def coordinated_by(self, worker: WorkerId) -> list[ParticipantPass]:
        """The passes in which this worker takes part and which began on that one."""
        passes = [active for active in self.all() if active.id.worker == worker]
        return [active for active in passes if isinstance(active, ParticipantPass)]

    def peer_lost(self, worker: WorkerId, error: PeerLost) -> None:
        """Fail the passes that cannot succeed without this worker."""
        for active in self.all():
            lost = PeerLost(f"{error.message}, in the middle of {active}")
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
                if isinstance(active, ParticipantPass) and not active.is_started:
                    self.over(active)  # its coordinator cannot reach us: nobody else ends it
            else:
                waiting.append(active.deadline)
        return min(waiting, default=None)
