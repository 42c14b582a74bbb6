"""Coming and going in an open world: telling the others, and hearing it from them.

A newcomer need only connect: its handshake says who it is. One that leaves says so and waits until
it was heard, so that nobody calls it any more by mistake.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.membership.rendezvous import MIXED, has_closed_world, put_roster, roster_in
from gradwire.agent.membership.shutdown import Parted
from gradwire.agent.messages import Done, Left
from gradwire.agent.peers.directory import WorkerInfo
from gradwire.agent.peers.signed_store import SignedStore
from gradwire.agent.peers.state import Member, Roster, not_unique
from gradwire.agent.requests.clock import Clock
from gradwire.agent.serving.dispatch import Lane, Payload
from gradwire.agent.serving.inbound_request import Source
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
class Register:
    """One worker's access to the roster."""

    def __init__(self, store: SignedStore, transports: Transports, clock: Clock) -> None:
        self._held: SignedStore | None = store
        self._transports = transports
        self._clock = clock

    @property
    def _store(self) -> SignedStore:
        if self._held is None:
            raise UsageError("this worker has left, and does not hold the store any more")
        return self._held

    def close(self) -> None:
        """Let go of the store: we may be the one who hosts it."""
        self._held = None

    def take_seat(
        self, name: str, id: WorkerId, address: str, limit: float, note: str = ""
    ) -> Member:
        """Become a member that nobody has heard of yet."""
        while True:
            roster, text = roster_in(self._store)
            alive = [m for m in roster.claimed(name, id) if self.is_alive(m.address)]
            if alive:
                raise _refusal(name, id, alive[0])
            dead = {member.life for member in roster.claimed(name, id)}
            changed, member = roster.without(dead).taken(name, id, address, note)
            if put_roster(self._store, changed, text):
                break
            self._pause(limit, f"{name} could not write itself into the roster")
        if has_closed_world(self._store):
            self.give_back({member.life}, limit)
            raise UsageError(MIXED, hint="meet at another init_method")
        return member

    def before(self, member: Member, limit: float) -> tuple[str, list[Member]]:
        """The job, and those in earlier seats, once each of them is known to the others.

        One that dies meanwhile loses its seat; one that is merely slow loses it at the limit.
        """
        pause = _LOOK_AGAIN_SECONDS
        while True:
            roster, _ = roster_in(self._store)
            unsettled = roster.unsettled_before(member.life)
            if not unsettled:
                return roster.job, roster.before(member.life)
            late = self._clock.now() >= limit
            dead = {m.life for m in unsettled if late or not self.is_alive(m.address)}
            if dead:
                self.give_back(dead, limit + _GRACE_SECONDS)
            else:
                threading.Event().wait(pause)
                pause = min(2 * pause, _LOOK_AT_LEAST_EVERY)

    def settle(self, member: Member, dead: set[int], limit: float) -> None:
        """Everyone else knows us, but for these, who are gone."""
        roster = self._change(lambda roster: roster.without(dead).settled(member.life), limit)
        if not roster.has(member.life):
            raise JoinTimeout(
                f"{member.name} took so long to join that it was given up by another",
                hint="a longer Timeouts(join=…) gives slow workers more time",
            )

    def give_back(self, lives: set[int], limit: float) -> None:
        """These have no seat any longer."""
        self._change(lambda roster: roster.without(lives), limit)

    def _change(self, decide: Callable[[Roster], Roster], limit: float) -> Roster:
        while True:
            roster, text = roster_in(self._store)
            changed = decide(roster)
            if put_roster(self._store, changed, text):
                return changed
            self._pause(limit, "the roster could not be changed")

    def _pause(self, limit: float, what: str) -> None:
        if self._clock.now() >= limit:
            raise JoinTimeout(f"{what}: others were faster all the time")
        threading.Event().wait(_LOOK_AGAIN_SECONDS)

    def is_alive(self, address: str) -> bool:
        """Whether somebody listens there; one that does not answer in time may be alive."""
        try:
            channel = self._transports.connect(address, self._clock.now() + _PROBE_SECONDS)
        except DeadlinePassed:
            return True
        except PeerLost:
            return False
        channel.close("it was only asked whether it is alive")
        return True


def _refusal(name: str, id: WorkerId, other: Member) -> UsageError:
    if other.name == name:
        return not_unique(name, other.id, id)
    return UsageError(
        f"{name} cannot join as number {id}: that is {other.name}, which is alive",
        hint="give each worker a rank of its own",
    )


@final
class Membership:
    """One worker's part in an open world."""

    def __init__(self, agent: Agent, register: Register) -> None:
        self._agent = agent
        self._register = register
        self._me = agent.directory.myself
        agent.handle(Left, self._serve_left, Lane.SERVICE)

    def come(self, deadline: float) -> None:
        """Let everyone who was here before know us. Those that are dead are told of no more."""
        dead: set[int] = set()
        for info in self._agent.directory.others():
            life = self._agent.directory.life(info.id)
            if not self._reached(info, deadline):
                dead.add(life)
                self._agent.directory.left(info.id, life)
        self._register.settle(self._me, dead, deadline)

    def _reached(self, info: WorkerInfo, deadline: float) -> bool:
        """Whether it lives. One that is slow is tried again: it must hear of us to reach us.

        So is one that sent us away: where many strangers knock, one of us may go with them.
        """
        address = self._agent.directory.address(info.id)
        while True:
            try:
                self._agent.reach(info.id, deadline)
                return True
            except NotTrusted:
                raise
            except PeerLost:
                if not self._register.is_alive(address):
                    return False
            except DeadlinePassed:
                pass
            if self._agent.clock.now() >= deadline:
                _log.warning("%s joined, but %s did not answer it", self._me.name, info.name)
                return True
            threading.Event().wait(_TRY_AGAIN_SECONDS)

    def leave(
        self,
        seconds: float,
        let_go: Callable[[], None],
        busy: Callable[[], bool],
        look: Callable[[], None] = lambda: None,
    ) -> Parted:
        """Wait for what is in flight here, let go of what we hold, and tell the others.

        Ends in time in any case. Who did not hear it goes on without us: it is no error.
        """
        deadline = self._agent.clock.now() + seconds
        self._wait_while(busy, deadline)
        let_go()
        self._wait_while(busy, deadline)
        look()
        self.give_back_seat(deadline)
        deaf: list[str] = []
        told: set[int] = set()
        while untold := {self._agent.directory.life(i.id): i.id for i in self._untold(told)}:
            told |= untold.keys()
            deaf += self._tell(list(untold.values()), deadline)
        self._wait_while(busy, deadline)
        return Parted([], deaf, [])

    def close(self) -> None:
        """Let go of the store."""
        self._register.close()

    def give_back_seat(self, deadline: float) -> None:
        """Later workers shall not look for us. The store may be gone already, with its host."""
        try:
            self._register.give_back({self._me.life}, deadline)
        except RuntimeError as error:
            _log.info("%s left, but its place in the roster stays: %s", self._me.name, error)

    def _untold(self, told: set[int]) -> list[WorkerInfo]:
        directory = self._agent.directory
        return [info for info in directory.others() if directory.life(info.id) not in told]

    def _tell(self, workers: list[WorkerId], deadline: float) -> list[str]:
        """Say goodbye to all of them at once; who did not hear it. The dead need not."""
        heard = []
        for worker in workers:
            try:
                what = f"the departure of {self._me.name}"
                _, promise = self._agent.request(
                    worker,
                    Left(self._me.life),
                    deadline=deadline,
                    what=what,
                    phase="shutdown",
                )
                heard.append((worker, promise))
            except GradwireError:
                continue
        outcomes = [(worker, promise.wait()) for worker, promise in heard]
        late = [worker for worker, outcome in outcomes if isinstance(outcome, DeadlinePassed)]
        return [self._agent.directory.name(worker) for worker in late]

    def _wait_while(self, busy: Callable[[], bool], deadline: float) -> None:
        while busy() and self._agent.clock.now() < deadline:
            threading.Event().wait(_LOOK_AGAIN_SECONDS)

    def _serve_left(self, message: Left, _: Payload, source: Source) -> None:
        self._agent.directory.left(source.worker, message.life)
        limit = self._agent.clock.now() + _ANSWER_SECONDS
        self._agent.answer(source, Done(), deadline=limit)
