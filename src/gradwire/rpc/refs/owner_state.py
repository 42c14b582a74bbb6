"""The owner's half of reference counting: the values of one worker, and which workers hold them.

state.py has the holder's half, the rules, and the other notes that this file refers to.

Note [A Fork is counted once]
A holder repeats its request to count a fork until it has the answer. A late duplicate must not
count a fork that was dropped meanwhile. So holders number their requests, and each message carries
`acked_below`: lower numbers are answered and not repeated. A request below it is a duplicate, so
the owner remembers, for each holder, only granted requests from there on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import final

from gradwire.errors import BadMessage, PeerLost
from gradwire.ids import ForkId, RefId, WorkerId
from gradwire.rpc.refs.handles_state import Action, ForgetValue, Unreachable, Verdict

_CountedFork = tuple[RefId, ForkId]


@final
class DuplicateFilter:
    """The granted requests that each holder may still repeat; see Note [A Fork is counted once]."""

    def __init__(self) -> None:
        self._acked_below: dict[WorkerId, int] = {}
        self._recent: dict[WorkerId, list[tuple[int, _CountedFork]]] = {}
        """by holder, as heaps"""

    def __len__(self) -> int:
        return sum(map(len, self._recent.values()))

    def note(self, holder: WorkerId, n: int, counted: _CountedFork) -> None:
        """Request `n` was granted: the fork is counted."""
        heappush(self._recent.setdefault(holder, []), (n, counted))

    def is_old(self, holder: WorkerId, n: int) -> bool:
        """Whether the holder has the answer to this request already."""
        return n < self._acked_below.get(holder, 0)

    def forget_acked(self, holder: WorkerId, acked_below: int) -> list[_CountedFork]:
        """A holder has the answers below this number; returns the forks of these requests."""
        self._acked_below[holder] = max(acked_below, self._acked_below.get(holder, 0))
        recent = self._recent.get(holder, [])
        settled = []
        while recent and recent[0][0] < acked_below:
            settled.append(heappop(recent)[1])
        if not recent:
            self._recent.pop(holder, None)
        return settled

    def lost(self, holder: WorkerId) -> list[_CountedFork]:
        """A worker is gone and repeats nothing; returns what it could have repeated."""
        self._acked_below.pop(holder, None)
        return [counted for _, counted in self._recent.pop(holder, [])]

    def of(self, holder: WorkerId) -> list[_CountedFork]:
        """The forks that a holder may ask for again."""
        return [counted for _, counted in self._recent.get(holder, [])]


@dataclass(slots=True)
class _OwnedValue:
    """A value that lives on this worker, or is about to."""

    handles: int = 0  # RRef objects on this worker
    forks: dict[ForkId, WorkerId] = field(default_factory=dict)  # forks that other workers hold
    # Forks counted on request, while the request may be repeated or the value is awaited.
    requested: set[ForkId] = field(default_factory=set)
    awaited: bool = False  # whether its creating call has not arrived yet
    lost: WorkerId | None = None  # the creator, if it was lost before its call arrived
    is_gone: bool = False  # whether the value no longer exists; its `requested` is incomplete


@final
class Owned:
    """The values of one worker, and their holders. `lost` is the table's set of lost peers."""

    def __init__(self, me: WorkerId, lost: set[WorkerId]) -> None:
        self._me, self._lost = me, lost
        self.values: dict[RefId, _OwnedValue] = {}
        self.requests = DuplicateFilter()

    # Handles of this worker itself, and forks that it makes.

    def made(self, ref: RefId) -> None:
        """A new value of this worker, with one handle."""
        self.values[ref] = _OwnedValue(handles=1)

    def maybe_another(self, ref: RefId) -> bool:
        """One more handle on a value of this worker, if it is still there."""
        value = self.values.get(ref)
        if value is None or value.is_gone:
            return False
        value.handles += 1
        return True

    def passed_on(self, ref: RefId, child: ForkId, to: WorkerId) -> None:
        """This worker passes it on in a new fork; PeerLost if the value will never be created."""
        value = self.values.get(ref)
        assert value is not None, f"{ref} is passed on without a handle"
        if value.lost is not None:
            raise PeerLost(f"{ref} cannot be passed on: w{value.lost} was lost before creating it")
        value.forks[child] = to

    def returned(self, ref: RefId, fork: ForkId) -> list[Action]:
        """A reference to a value of this worker arrived: one more handle."""
        value = self.values.get(ref)
        actions: list[Action] = []
        if value is None:  # see Note [A fork may come before its value]
            if fork.worker in self._lost:
                value = _OwnedValue(lost=fork.worker, is_gone=True)
                actions.append(Unreachable(ref, None, fork.worker))
            elif fork.worker == ref.worker:
                value = _OwnedValue(awaited=True)
            else:
                text = f"w{fork.worker} passed {ref} to w{self._me}, which does not own it"
                raise BadMessage(text)
            self.values[ref] = value
        value.handles += 1
        value.forks.pop(fork, None)  # present if this worker passed it to itself
        return actions

    def handle_ended(self, ref: RefId) -> list[Action]:
        """A handle of this worker ended."""
        value = self.values[ref]
        assert value.handles > 0, f"a handle of {ref} ended twice"
        value.handles -= 1
        return self._maybe_forget(ref)

    # Messages of holders and creators.

    def creation_arrived(self, ref: RefId, fork: ForkId) -> list[Action]:
        """The creating call arrived; its creator holds the fork."""
        value = self.values.setdefault(ref, _OwnedValue())
        value.awaited = False
        # A fork that was requested is counted already, and may have been dropped since.
        if fork not in value.requested and fork.worker not in self._lost:
            value.forks[fork] = fork.worker
        return self._maybe_forget(ref)

    def forget_acked(self, holder: WorkerId, acked_below: int) -> None:
        """A holder has the answers to its requests below this number."""
        for ref, fork in self.requests.forget_acked(holder, acked_below):
            value = self.values.get(ref)
            # Keep it while awaited: the creating call may still arrive, and count the fork again.
            if value is not None and not value.awaited:
                value.requested.discard(fork)

    def fork_arrived(self, ref: RefId, fork: ForkId, holder: WorkerId, n: int = 0) -> Verdict:
        """A holder asks to count its fork; the verdict is the answer."""
        if holder in self._lost or self.requests.is_old(holder, n):
            return Verdict.NEVER
        value = self.values.get(ref)
        if value is None or value.is_gone:
            # See Note [A fork may come before its value].
            may_come = fork.worker == ref.worker and fork.worker not in self._lost
            return Verdict.NOT_YET if may_come else Verdict.NEVER
        if fork not in value.requested:
            value.requested.add(fork)
            value.forks[fork] = holder
            self.requests.note(holder, n, (ref, fork))
        return Verdict.COUNTED

    def drop_arrived(self, ref: RefId, fork: ForkId) -> list[Action]:
        """A fork is no longer held. One that is not known here was dropped before."""
        value = self.values.get(ref)
        if value is None or value.forks.pop(fork, None) is None:
            return []
        return self._maybe_forget(ref)

    def holder_lost(self, worker: WorkerId) -> list[Action]:
        """Drop the forks and requests of a lost peer, and fail the values that it was creating."""
        for ref, fork in self.requests.lost(worker):
            if ref in self.values:
                self.values[ref].requested.discard(fork)
        return [action for ref in list(self.values) for action in self._drop_forks_of(ref, worker)]

    # Queries.

    def leaks(self) -> list[tuple[RefId, ForkId, WorkerId]]:
        """The forks that other workers still hold, with their holders."""
        return [
            (ref, fork, holder)
            for ref, value in self.values.items()
            for fork, holder in value.forks.items()
        ]

    def may_use(self, ref: RefId, worker: WorkerId) -> bool:
        """Whether a worker may use a value: as its creator, as a holder, or as a lost worker.

        The forks of a lost worker are dropped, but its last messages may still arrive, and requests
        to count forks that it made. True for an unknown value: there is nothing to protect.
        """
        value = self.values.get(ref)
        if value is None or value.is_gone or worker in (self._me, ref.worker):
            return True
        return worker in value.forks.values() or worker in self._lost

    def holder_of(self, ref: RefId, fork: ForkId) -> WorkerId | None:
        """The holder of a fork, if it is counted."""
        value = self.values.get(ref)
        return None if value is None else value.forks.get(fork)

    def forks_of(self, worker: WorkerId) -> int:
        """Forks that count for its limit: those it holds, and dropped ones it may request again."""
        dropped = sum(self.holder_of(*counted) != worker for counted in self.requests.of(worker))
        return dropped + sum(holder == worker for *_, holder in self.leaks())

    def _drop_forks_of(self, ref: RefId, worker: WorkerId) -> list[Action]:
        value = self.values[ref]
        value.forks = {fork: holder for fork, holder in value.forks.items() if holder != worker}
        if not (value.awaited and ref.worker == worker):
            return self._maybe_forget(ref)
        value.awaited = False
        value.lost = worker
        return [Unreachable(ref, None, worker), *self._maybe_forget(ref)]

    def _maybe_forget(self, ref: RefId) -> list[Action]:
        # Keep an awaited value without holders: `requested` is needed until the creating call
        # arrives.
        value = self.values[ref]
        if value.handles or value.forks or value.awaited:
            return []
        del self.values[ref]
        return [ForgetValue(ref)]
