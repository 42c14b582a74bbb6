"""Joining and leaving an open world: the roster in the store, and what members tell each other.

A worker registers in the roster, then announces itself by connecting to each member before it. One
that leaves tells all members and waits until they have acknowledged it, so that none calls it by
mistake. The roster has no lock that a dying worker could keep: each change is one compare-and-set.
A worker that dies while it joins is found dead by the next, or removed when its time is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.membership.rendezvous import MIXED, ROUNDS, put_roster, roster_in
from gradwire.agent.membership.shutdown import Action, ShutdownResult
from gradwire.agent.messages import Done, Left
from gradwire.agent.peers.directory import Member, Roster, WorkerInfo, not_unique
from gradwire.agent.peers.secret import SignedStore
from gradwire.agent.requests.timer import Clock
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import (
    DeadlinePassed,
    GradwireError,
    JoinTimeout,
    NotTrusted,
    PeerLost,
    UsageError,
)
from gradwire.ids import WorkerId
from gradwire.transport.address import Transports

_LOOK_AGAIN_SECONDS = 0.005
_LOOK_AT_LEAST_EVERY = 0.2
_PROBE_SECONDS = 2.0
_GRACE_SECONDS = 5.0
_TRY_AGAIN_SECONDS = 0.05
_ANSWER_SECONDS = 10.0
_log = logging.getLogger("gradwire")


@final
class RosterStore:
    """One worker's access to the roster in the store."""

    def __init__(self, store: SignedStore, transports: Transports, clock: Clock) -> None:
        self._held: SignedStore | None = store
        self._transports, self._clock = transports, clock

    @property
    def _store(self) -> SignedStore:
        if self._held is None:
            raise UsageError("this worker has left, and has released the store")
        return self._held

    def close(self) -> None:
        """Release the store, which this process may host."""
        self._held = None

    def register(
        self, name: str, id: WorkerId, address: str, limit: float, note: str = ""
    ) -> Member:
        """Add this worker to the roster; the others do not know it yet."""

        def with_me(roster: Roster) -> Roster:
            holders = roster.holders(name, id)
            for other in filter(lambda member: self.is_alive(member.address), holders):
                if other.name == name:
                    raise not_unique(name, other.id, id)
                raise UsageError(
                    f"{name} cannot join as number {id}: that is {other.name}, which is alive",
                    hint="give each worker a rank of its own",
                )
            dead = {member.incarnation for member in holders}
            return roster.without(dead).with_member(name, id, address, note)

        me = self._change(with_me, limit).entries[-1].member
        if self._store.add(ROUNDS, 0):  # workers with a world size have met here
            self.unregister({me.incarnation}, limit)
            raise UsageError(MIXED, hint="meet at another init_method")
        return me

    def before(self, member: Member, limit: float) -> tuple[str, list[Member]]:
        """The job and the members with earlier entries, once all of these are announced.

        One that dies meanwhile is removed; one that is merely slow is removed at the limit.
        """
        pause = _LOOK_AGAIN_SECONDS
        while True:
            roster, _ = roster_in(self._store)
            unannounced = roster.unannounced_before(member.incarnation)
            if not unannounced:
                return roster.job, roster.before(member.incarnation)
            late = self._clock.now() >= limit
            dead = {m.incarnation for m in unannounced if late or not self.is_alive(m.address)}
            if dead:
                self.unregister(dead, limit + _GRACE_SECONDS)
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_AT_LEAST_EVERY)

    def mark_announced(self, member: Member, dead: set[int], limit: float) -> None:
        """Note that all members know this one, and remove those found dead."""
        mine = member.incarnation
        roster = self._change(lambda roster: roster.without(dead).with_announced(mine), limit)
        if not roster.has(mine):
            raise JoinTimeout(
                f"{member.name} took so long to join that it was given up by another worker",
                hint="a longer Timeouts(join=…) gives slow workers more time",
            )

    def unregister(self, incarnations: set[int], limit: float) -> None:
        """Remove these incarnations from the roster."""
        self._change(lambda roster: roster.without(incarnations), limit)

    def _change(self, decide: Callable[[Roster], Roster], limit: float) -> Roster:
        while True:
            roster, text = roster_in(self._store)
            changed = decide(roster)
            if put_roster(self._store, changed, text):
                return changed
            if self._clock.now() >= limit:
                raise JoinTimeout("the roster could not be changed: others changed it each time")
            time.sleep(_LOOK_AGAIN_SECONDS)

    def is_alive(self, address: str) -> bool:
        """Whether a process listens there. One that does not answer in time counts as alive."""
        try:
            channel = self._transports.connect(address, self._clock.now() + _PROBE_SECONDS)
        except DeadlinePassed:
            return True
        except PeerLost:
            return False
        channel.close("this was only a liveness probe")
        return True


@final
class Membership:
    """Announces one worker to the others of an open world, and tells them when it leaves."""

    def __init__(self, agent: Agent, roster: RosterStore) -> None:
        self._agent, self._roster, self._me = agent, roster, agent.directory.myself
        agent.handle(Left, self._serve_left, Lane.SERVICE)

    def announce(self, deadline: float) -> None:
        """Connect to all members that registered earlier, and remove those that are dead."""
        dead: set[int] = set()
        for info in self._agent.directory.others():
            incarnation = self._agent.directory.incarnation(info.id)
            if not self._reached(info, deadline):
                dead.add(incarnation)
                self._agent.directory.left(info.id, incarnation)
        self._roster.mark_announced(self._me, dead, deadline)

    def _reached(self, info: WorkerInfo, deadline: float) -> bool:
        """Connect to a member; False if it is dead.

        A slow member is tried again, as it must know this worker before it can call it. So is one
        that closed the connection: among many unauthenticated ones it may have dropped ours.
        """
        address = self._agent.directory.address(info.id)
        while True:
            try:
                self._agent.reach(info.id, deadline)
                return True
            except NotTrusted:
                raise
            except PeerLost:
                if not self._roster.is_alive(address):
                    return False
            except DeadlinePassed:
                pass
            if self._agent.clock.now() >= deadline:
                _log.warning("%s joined, but %s did not answer", self._me.name, info.name)
                return True
            time.sleep(_TRY_AGAIN_SECONDS)

    def leave(
        self, seconds: float, let_go: Action, busy: Callable[[], bool], look: Action
    ) -> ShutdownResult:
        """Wait for what is in flight, call `let_go` and `look`, and tell the others.

        Always ends in time. It is no error if a member has not acknowledged it by then.
        """
        deadline, directory = self._agent.clock.now() + seconds, self._agent.directory

        def wait_while_busy() -> None:
            while busy() and self._agent.clock.now() < deadline:
                time.sleep(_LOOK_AGAIN_SECONDS)

        wait_while_busy()
        let_go()
        wait_while_busy()
        look()
        try:  # so that later workers do not dial us; the store's host may be gone
            self._roster.unregister({self._me.incarnation}, deadline)
        except RuntimeError as error:
            _log.info("%s left, but stays in the roster: %s", self._me.name, error)
        late: list[str] = []
        told: set[int] = set()
        while True:
            others = {directory.incarnation(info.id): info.id for info in directory.others()}
            untold = {other: id for other, id in others.items() if other not in told}
            if not untold:
                break
            told |= untold.keys()
            late += self._tell(untold.values(), deadline)
        wait_while_busy()
        return ShutdownResult([], late, [])

    def close(self) -> None:
        """Release the store."""
        self._roster.close()

    def _tell(self, workers: Iterable[WorkerId], deadline: float) -> list[str]:
        """Send Left to these members at once; returns the names of those that answered late."""
        left, what, sent = Left(self._me.incarnation), f"the departure of {self._me.name}", []
        for worker in workers:
            with suppress(GradwireError):
                _, promise = self._agent.request(
                    worker, left, deadline=deadline, description=what, phase="shutdown"
                )
                sent.append((worker, promise))
        outcomes = [(worker, promise.wait()) for worker, promise in sent]
        late = [worker for worker, outcome in outcomes if isinstance(outcome, DeadlinePassed)]
        return [self._agent.directory.name(worker) for worker in late]

    def _serve_left(self, message: Left, _: Payload, source: Source) -> None:
        self._agent.directory.left(source.worker, message.incarnation)
        limit = self._agent.clock.now() + _ANSWER_SECONDS
        self._agent.answer(source, Done(), deadline=limit)
