"""The roster of an open world, kept in a store: how a worker takes its seat and gives it back.

There is no lock that a dying worker could keep: each change is one compare-and-set. A worker that
dies while it joins is found dead by the next one, or given up when the time is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from gradwire.agent.membership.rendezvous import MIXED, has_closed_world, put_roster, roster_in
from gradwire.agent.peers.roster_state import Roster
from gradwire.agent.peers.signed_store import SignedStore
from gradwire.agent.peers.state import Member, not_unique
from gradwire.agent.requests.timer import Clock
from gradwire.errors import DeadlinePassed, JoinTimeout, PeerLost, UsageError
from gradwire.ids import WorkerId
from gradwire.transport.address import Transports

_LOOK_AGAIN_SECONDS = 0.005
_LOOK_AT_LEAST_EVERY = 0.2
_PROBE_SECONDS = 2.0
_GRACE_SECONDS = 5.0


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
