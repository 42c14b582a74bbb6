"""The owner's half of the counting of references: the values of one worker, and who holds them.

The rules are those of state.py, where both halves meet; so are the notes named here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from gradwire.errors import BadMessage, PeerLost
from gradwire.ids import ForkId, RefId, WorkerId
from gradwire.rpc.refs.dedup_state import Asked
from gradwire.rpc.refs.handles_state import Action, Forget, Unreachable, Verdict


@dataclass(slots=True)
class _Value:
    """A value owned here. `asked` are those of its forks that may be asked for again.

    An `awaited` one is `lost` when its creator is. One that `is_gone` was forgotten before a
    reference to it came home; it stands for that hold only, its tombstones are no more.
    """

    holds: int = 0
    forks: dict[ForkId, WorkerId] = field(default_factory=dict)
    asked: set[ForkId] = field(default_factory=set)
    awaited: bool = False
    lost: WorkerId | None = None
    is_gone: bool = False


@final
class Owned:
    """The values of one worker. `lost` are the peers that are gone, as its table knows them."""

    def __init__(self, me: WorkerId, lost: set[WorkerId]) -> None:
        self._me, self._lost = me, lost
        self.values: dict[RefId, _Value] = {}
        self.asked = Asked()

    # Holds of this worker itself, and forks that it makes.

    def made(self, ref: RefId) -> None:
        """A new value of this worker's own, with one hold on it."""
        self.values[ref] = _Value(holds=1)

    def passed_on(self, ref: RefId, child: ForkId, to: WorkerId) -> None:
        """A fork is about to travel; PeerLost if there will be no value."""
        value = self.values.get(ref)
        assert value is not None, f"{ref} is passed on without a hold on it"
        if value.lost is not None:
            raise PeerLost(f"{ref} cannot be passed on: w{value.lost} was lost before creating it")
        value.forks[child] = to

    def came_home(self, ref: RefId, fork: ForkId) -> list[Action]:
        """A reference to a value of ours came: one more hold on it."""
        value = self.values.get(ref)
        actions: list[Action] = []
        if value is None:
            value = self.values[ref] = self._value_before_creation(ref, fork)
            if value.lost is not None:
                actions.append(Unreachable(ref, None, value.lost))
        value.holds += 1
        value.forks.pop(fork, None)  # there if we passed it to ourselves
        return actions

    def hold_ended(self, ref: RefId) -> list[Action]:
        """One hold less."""
        value = self.values[ref]
        assert value.holds > 0, f"a hold on {ref} ended twice"
        value.holds -= 1
        return self._maybe_forget(ref)

    # What holders and creators say.

    def creation_arrived(self, ref: RefId, fork: ForkId) -> list[Action]:
        """The creating call reached us, the owner; its creator holds the fork."""
        value = self.values.setdefault(ref, _Value())
        value.awaited = False
        # Whoever asked was counted then, and may have dropped it since.
        if fork not in value.asked and fork.worker not in self._lost:
            value.forks[fork] = fork.worker
        return self._maybe_forget(ref)

    def settled_below(self, holder: WorkerId, floor: int) -> None:
        """A holder has heard the answers to what it asked us below this number."""
        for ref, fork in self.asked.settled_below(holder, floor):
            value = self.values.get(ref)
            if value is not None and not value.awaited:  # its creating call may be late
                value.asked.discard(fork)

    def fork_arrived(self, ref: RefId, fork: ForkId, holder: WorkerId, n: int = 0) -> Verdict:
        """A holder asks us, the owner, to count its fork; it gets the verdict as the answer."""
        if holder in self._lost or self.asked.is_old(holder, n):
            return Verdict.NEVER
        value = self.values.get(ref)
        if value is None or value.is_gone:
            return self._verdict_on_unknown(ref, fork)
        if fork not in value.asked:
            value.asked.add(fork)
            value.forks[fork] = holder
            self.asked.note(holder, n, (ref, fork))
        return Verdict.COUNTED

    def drop_arrived(self, ref: RefId, fork: ForkId) -> list[Action]:
        """A fork of our value is no longer held; news of what we do not know is old news."""
        value = self.values.get(ref)
        if value is None or value.forks.pop(fork, None) is None:
            return []
        return self._maybe_forget(ref)

    def holder_lost(self, worker: WorkerId) -> list[Action]:
        """A peer is gone, with what it held, asked and was about to create."""
        for ref, fork in self.asked.lost(worker):
            if ref in self.values:
                self.values[ref].asked.discard(fork)
        return [action for ref in list(self.values) for action in self._lost_to(ref, worker)]

    # What is asked of it.

    def leaks(self) -> list[tuple[RefId, ForkId, WorkerId]]:
        """The forks of our values that others still hold, and who."""
        return [
            (ref, fork, holder)
            for ref, value in self.values.items()
            for fork, holder in value.forks.items()
        ]

    def may_use(self, ref: RefId, worker: WorkerId) -> bool:
        """Whether a value of ours is for this worker: its creator, a holder, or one that was lost.

        Of a value that is not here there is nothing to be had.
        """
        value = self.values.get(ref)
        if value is None or value.is_gone or worker in (self._me, ref.worker):
            return True
        return worker in value.forks.values() or worker in self._lost

    def holder_of(self, ref: RefId, fork: ForkId) -> WorkerId | None:
        """Who holds a fork of a value of ours, if that is counted."""
        value = self.values.get(ref)
        return None if value is None else value.forks.get(fork)

    def forks_of(self, worker: WorkerId) -> int:
        """How many forks of our values a worker holds, or may ask for again."""
        dropped = sum(self.holder_of(*asked) != worker for asked in self.asked.of(worker))
        return dropped + sum(
            holder == worker for value in self.values.values() for holder in value.forks.values()
        )

    def _value_before_creation(self, ref: RefId, fork: ForkId) -> _Value:
        # See Note [A fork may come before its value].
        if fork.worker in self._lost:
            return _Value(lost=fork.worker, is_gone=True)
        if fork.worker == ref.worker:
            return _Value(awaited=True)
        raise BadMessage(f"w{fork.worker} passed {ref} to w{self._me}, which does not own it")

    def _verdict_on_unknown(self, ref: RefId, fork: ForkId) -> Verdict:
        # See Note [A fork may come before its value].
        may_come = fork.worker == ref.worker and fork.worker not in self._lost
        return Verdict.NOT_YET if may_come else Verdict.NEVER

    def _lost_to(self, ref: RefId, worker: WorkerId) -> list[Action]:
        value = self.values[ref]
        value.forks = {fork: holder for fork, holder in value.forks.items() if holder != worker}
        if not (value.awaited and ref.worker == worker):
            return self._maybe_forget(ref)
        value.awaited = False
        value.lost = worker
        return [Unreachable(ref, None, worker), *self._maybe_forget(ref)]

    def _maybe_forget(self, ref: RefId) -> list[Action]:
        # Kept while awaited though nobody holds it: tombstones must last until the call comes.
        value = self.values[ref]
        if value.holds or value.forks or value.awaited:
            return []
        del self.values[ref]
        return [Forget(ref)]
