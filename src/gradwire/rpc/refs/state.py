"""Who may forget a value: the references of one worker, counted by fork.

Rules of this file:
  1. Pure. No torch, no threads, no clock: it never sees a value, only ids.
  2. Inputs are methods, outputs are actions. Whoever owns the table performs them, in order.
  3. It does not resend. `unacknowledged()` says what to send again, whenever someone wants to.

A value lives on its *owner*. A *hold* is one RRef object; its end is reported once. Holds on the
owner are a plain count. Every hold elsewhere is one *fork* with an id of its own, even if a worker
already holds the same value: forks are never shared, so each is born, counted and dropped once.
The owner's half of all this is in owner_state.py, the holder's in this file.

    SendFork     holder -> owner    "I hold this fork, count it", answered by a verdict
    SendAccept   holder -> maker    "the fork you made for me needs you no longer"
    SendDrop     holder -> owner    "I hold this fork no longer"
    AskMaker     holder -> maker    "the owner does not know the value: may it still come?"

All four may be lost, repeated, late and overtaken. The calls and answers that carry references
come at most once, may be late, and are lost only together with a peer. Why nothing is forgotten
too early or kept for ever:

  * A fork is released only when counted, its hold has ended, and every fork made from it is
    accepted. So whoever waits to be counted has a maker whose own fork keeps the value there.
  * A Drop is only sent once the owner has counted the fork, so it never overtakes the counting.
  * A repeated Fork must not count again what was dropped: a fork that asked is remembered as long
    as its value, or until its holder says that it has heard the answer (dedup_state.py). Forks
    that the owner made itself never ask, and leave nothing behind.

Note [A fork may come before its value]
The creator may pass on a reference whose creating call is still on its way, so a Fork, or the
reference itself, can reach the owner first. A Fork is then answered NOT_YET and asked again; it
cannot be counted in advance, as it looks the same as a late copy about a value long forgotten. The
creating call may also have gone with a connection, or the value with one after it: the creator then
keeps nothing of the fork, and says so when it is asked (AskMaker). A reference comes once, so its
value is awaited. Others than the creator may pass on only what is counted: then an unknown value in
a fork of theirs is a forgotten one, and the answer is NEVER.

Note [A creation that timed out is asked about]
Its call may still be on the way. A Drop at once would be ignored by an owner that knows no such
value, and the late call would then count a fork that nobody drops. So the creator asks like any
other holder, and drops once it is counted.

What the file relies on: the owner reports `creation_arrived` for every creating call, even one it
then refuses; a receiver reports `arrived` for every reference of a call, even one it then refuses;
peers are reported lost also to workers that only heard of them (a NOT_YET names whom to watch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, final

from gradwire.errors import BadMessage, PeerLost, UsageError
from gradwire.ids import ForkId, RefId, WorkerId
from gradwire.rpc.refs.dedup_state import Asking
from gradwire.rpc.refs.handles_state import (
    Action,
    AskMaker,
    Confirmed,
    RefHandle,
    RefStatistics,
    SendAccept,
    SendDrop,
    SendFork,
    Unreachable,
    Verdict,
)
from gradwire.rpc.refs.owner_state import Owned


class _Stage(Enum):
    CREATING = "creating"
    ASKING = "asking"
    COUNTED = "counted"
    BROKEN = "broken"


_WAITING = (_Stage.CREATING, _Stage.ASKING)


@dataclass(slots=True)
class _Held:
    """A fork held here, until it is dropped. `children` were made from it and still need it."""

    ref: RefId
    fork: ForkId
    owner: WorkerId
    stage: _Stage
    n: int | None = None
    """of the question to count it, while that is asked"""
    alive: bool = True
    children: set[ForkId] = field(default_factory=set)
    lost: WorkerId | None = None


class _Child(NamedTuple):
    parent: ForkId
    to: WorkerId


@final
class RefTable:
    """The references of one worker.

    Ids start at `first`; a worker that comes back under the same number must start above all ids
    of its earlier lives.
    """

    def __init__(self, me: WorkerId, *, first: int = 0) -> None:
        self._me = me
        self._next = first
        self._held: dict[ForkId, _Held] = {}
        self._children: dict[ForkId, _Child] = {}
        self._accepts: dict[ForkId, SendAccept] = {}
        self._drops: dict[ForkId, SendDrop] = {}
        self._asking = Asking(first)
        self._lost: set[WorkerId] = set()
        self.owned = Owned(me, self._lost)
        """the values of this worker, and who holds them"""

    def __repr__(self) -> str:
        return f"<RefTable of w{self._me}: {self.statistics()}>"

    # Making, passing and ending holds.

    def create(self, owner: WorkerId, life: int = 0) -> RefHandle:
        """A new value: here at once, on another worker when the creating call arrives there."""
        ref = RefId(self._me, self._number())
        if owner == self._me:
            self.owned.made(ref)
            return RefHandle(ref, owner, None, life)
        fork = ForkId(self._me, self._number())
        self._held[fork] = _Held(ref, fork, owner, _Stage.CREATING)
        return RefHandle(ref, owner, fork, life)

    def pack(self, hold: RefHandle, to: WorkerId) -> ForkId:
        """A new fork, about to travel to `to` with the hold's ref and owner."""
        child = ForkId(self._me, self._number())
        if hold.fork is None:
            self.owned.passed_on(hold.ref, child, to)
        else:
            self._passable_fork(hold.ref, hold.fork).children.add(child)
            self._children[child] = _Child(hold.fork, to)
        return child

    def pack_undone(self, hold: RefHandle, child: ForkId) -> list[Action]:
        """What was packed has certainly not left."""
        if hold.fork is None:
            return self.owned.drop_arrived(hold.ref, child)
        return self._child_settled(child)

    def arrived(
        self, ref: RefId, owner: WorkerId, fork: ForkId, life: int = 0, *, is_stale: bool = False
    ) -> tuple[RefHandle, list[Action]]:
        """A reference came with a call or an answer of the worker that made the fork.

        A stale one is to a value that was lost with an earlier life of its owner.
        """
        if owner == self._me:
            actions = self.owned.came_home(ref, fork)
            return RefHandle(ref, owner, None, life), actions + self._accept(fork)
        if fork in self._held:
            raise BadMessage(f"{fork} came twice")
        stage = _Stage.COUNTED if fork.worker == owner else _Stage.ASKING
        held = self._held[fork] = _Held(ref, fork, owner, stage)
        actions = self._broke(held, owner) if is_stale else self._first_actions(held)
        return RefHandle(ref, owner, fork, life), actions

    def hold_ended(self, hold: RefHandle) -> list[Action]:
        """The RRef object is gone; to be reported once."""
        if hold.fork is None:
            return self.owned.hold_ended(hold.ref)
        held = self._held.get(hold.fork)
        return [] if held is None else self._ended(held)

    def abandon(self) -> list[Action]:
        """End all holds on values of others, as at shutdown; what still waits is dropped later."""
        return [action for held in list(self._held.values()) for action in self._ended(held)]

    # What became of a creating call.

    def creation_answered(self, fork: ForkId) -> list[Action]:
        """The owner answered the creating call, so it has counted the fork or never will."""
        held = self._held.get(fork)
        if held is None or held.stage is not _Stage.CREATING:
            return []
        return self._counted(held)

    def creation_timed_out(self, fork: ForkId) -> list[Action]:
        """Nobody waits for the answer any more."""
        # See Note [A creation that timed out is asked about].
        held = self._held.get(fork)
        if held is None or held.stage is not _Stage.CREATING:
            return []
        return self._ask(held)

    def creation_lost(self, fork: ForkId) -> list[Action]:
        """The creating call went with its connection to the owner."""
        held = self._held.get(fork)
        if held is None or held.stage is not _Stage.CREATING:
            return []
        return self._broke(held, held.owner)

    def creation_undone(self, fork: ForkId) -> None:
        """The creating call has certainly not left."""
        held = self._held.pop(fork, None)
        assert held is None or not held.children, f"{fork} was passed on before it was sent for"

    # What other workers say.

    def fork_answered(self, fork: ForkId, verdict: Verdict) -> list[Action]:
        """The owner answered our Fork."""
        held = self._held.get(fork)
        if held is None or held.stage is not _Stage.ASKING:
            return []
        if verdict is Verdict.NOT_YET:
            return [] if fork.worker == self._me else [AskMaker(fork, fork.worker)]
        return self._counted(held) if verdict is Verdict.COUNTED else self._broke(held, fork.worker)

    def maker_answered(self, fork: ForkId, verdict: Verdict) -> list[Action]:
        """The maker of our fork answered whether its value may still come."""
        held = self._held.get(fork)
        if held is None or held.stage is not _Stage.ASKING or verdict is not Verdict.NEVER:
            return []
        return self._broke(held, held.owner)

    def fork_unwanted(self, asked: SendFork, verdict: Verdict) -> list[Action]:
        """The owner answered; what it has counted, and we gave up meanwhile, is dropped."""
        held = self._held.get(asked.fork)
        is_wanted = held is not None and held.stage is not _Stage.BROKEN
        if is_wanted or verdict is not Verdict.COUNTED or asked.to in self._lost:
            return []
        send = self._drops[asked.fork] = SendDrop(asked.ref, asked.fork, asked.to)
        return [send]

    def accept_arrived(self, fork: ForkId) -> list[Action]:
        """The holder of a fork that we made no longer needs ours."""
        return self._child_settled(fork)

    def accept_acknowledged(self, fork: ForkId) -> None:
        """Our Accept was heard."""
        self._accepts.pop(fork, None)

    def owed_accepts(self, forks: Sequence[ForkId]) -> list[Action]:
        """The Accepts for these that are not heard yet."""
        return [self._accepts[fork] for fork in forks if fork in self._accepts]

    def drop_acknowledged(self, fork: ForkId) -> None:
        """Our Drop was heard."""
        self._drops.pop(fork, None)

    def peer_lost(self, worker: WorkerId) -> list[Action]:
        """A peer is gone, with what it held, what it owned, and what was on its way to it."""
        self._lost.add(worker)
        self._accepts = {fork: send for fork, send in self._accepts.items() if send.to != worker}
        self._drops = {fork: send for fork, send in self._drops.items() if send.to != worker}
        actions = self.owned.holder_lost(worker)
        for held in list(self._held.values()):
            # A creating call may leave only after the loss; its own end says what became of it.
            if held.owner == worker and held.stage is not _Stage.CREATING:
                actions += self._broke(held, worker)
        for child in [child for child, made in self._children.items() if made.to == worker]:
            actions += self._child_settled(child)
        return actions

    def peer_joined(self, worker: WorkerId) -> None:
        """A lost peer's number is in use again; nothing of its old life may be reported."""
        self._lost.discard(worker)

    # What is asked of the table.

    def is_confirmed(self, fork: ForkId) -> bool:
        """Whether the owner has counted a fork that we hold."""
        held = self._held.get(fork)
        return held is not None and held.stage is _Stage.COUNTED

    def is_lendable(self, fork: ForkId) -> bool:
        """Whether the owner has counted a fork, and we hold it: it keeps the value meanwhile."""
        held = self._held.get(fork)
        return held is not None and held.alive and held.stage is _Stage.COUNTED

    def is_asking(self, fork: ForkId) -> bool:
        """Whether we wait for the owner to count a fork; until then it cannot be passed on."""
        held = self._held.get(fork)
        return held is not None and held.stage is _Stage.ASKING

    def is_uncounted(self, fork: ForkId) -> bool:
        """Whether the owner may not know the value yet; until then it cannot be fetched."""
        held = self._held.get(fork)
        return held is not None and held.stage in _WAITING

    def pending(self) -> bool:
        """Whether a graceful shutdown should still wait for others."""
        waiting = any(held.stage in _WAITING for held in self._held.values())
        return waiting or bool(self._children or self._accepts or self._drops)

    def unacknowledged(self) -> list[Action]:
        """All that was sent and not heard: send it again."""
        forks = [
            SendFork(held.ref, held.fork, held.owner, held.n)
            for held in self._held.values()
            if held.n is not None
        ]
        return [*forks, *self._accepts.values(), *self._drops.values()]

    def may_come(self, fork: ForkId, asker: WorkerId) -> Verdict:
        """Whether the value of a fork may still come: NOT_YET, while we keep it for who asks."""
        return Verdict.NOT_YET if self.taker_of(fork) == asker else Verdict.NEVER

    def taker_of(self, fork: ForkId) -> WorkerId | None:
        """For whom we made a fork of another's value that is not accepted yet."""
        made = self._children.get(fork)
        return None if made is None else made.to

    def floor(self, owner: WorkerId) -> int:
        """Below this number we have heard what an owner said to our questions."""
        return self._asking.floor(owner)

    def unsettled(self) -> bool:
        """Whether a fork held here is not counted yet, or one made here not accepted."""
        waiting = any(fork.stage in _WAITING for fork in self._held.values())
        return waiting or bool(self._children)

    def statistics(self) -> RefStatistics:
        """How much is remembered."""
        values, held = self.owned.values.values(), self._held.values()
        return RefStatistics(
            owned=len(values),
            shared=sum(bool(value.forks) for value in values),
            forks=sum(len(value.forks) for value in values),
            tombstones=sum(len(value.asked - value.forks.keys()) for value in values),
            held=len(held),
            pending_users=sum(fork.stage in _WAITING for fork in held),
            pending_children=len(self._children),
            unacknowledged=len(self._accepts) + len(self._drops),
        )

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    # The holder's part.

    def _passable_fork(self, ref: RefId, fork: ForkId) -> _Held:
        held = self._held.get(fork)
        if held is None or not held.alive:
            raise UsageError(
                f"{ref} was dropped by w{self._me} and cannot be passed on",
                hint="pass references on before shutdown()",
            )
        if held.lost is not None:
            raise PeerLost(f"{ref} cannot be passed on: w{held.lost}, or the way to it, was lost")
        if held.stage is _Stage.ASKING:
            raise UsageError(
                f"{ref} cannot be passed on before w{held.owner} has counted {fork}",
                hint="wait until confirmed_by_owner() is true",
            )
        return held

    def _first_actions(self, held: _Held) -> list[Action]:
        if held.owner in self._lost:
            return self._broke(held, held.owner)
        return [] if held.stage is _Stage.COUNTED else self._ask(held)

    def _ask(self, held: _Held) -> list[Action]:
        n = held.n = self._asking.asked(held.owner)
        held.stage = _Stage.ASKING
        return [SendFork(held.ref, held.fork, held.owner, n)]

    def _ask_no_more(self, held: _Held) -> None:
        if held.n is not None:
            self._asking.settled(held.owner, held.n)
            held.n = None

    def _counted(self, held: _Held) -> list[Action]:
        self._ask_no_more(held)
        held.stage = _Stage.COUNTED
        confirmed: list[Action] = [Confirmed(held.ref, held.fork)] if held.alive else []
        return confirmed + self._accept(held.fork) + self._maybe_drop(held)

    def _broke(self, held: _Held, lost: WorkerId) -> list[Action]:
        if held.stage is _Stage.BROKEN:
            return []
        self._ask_no_more(held)
        # The maker may not know of the loss, and waits for us.
        accepted = self._accept(held.fork) if held.stage is _Stage.ASKING else []
        for child in held.children:
            del self._children[child]
        held.children.clear()
        held.stage = _Stage.BROKEN
        held.lost = lost
        if held.alive:
            return [Unreachable(held.ref, held.fork, lost), *accepted]
        del self._held[held.fork]
        return accepted

    def _ended(self, held: _Held) -> list[Action]:
        held.alive = False
        if held.stage is _Stage.BROKEN:
            del self._held[held.fork]
            return []
        return self._maybe_drop(held)

    def _maybe_drop(self, held: _Held) -> list[Action]:
        if held.alive or held.children or held.stage is not _Stage.COUNTED:
            return []
        del self._held[held.fork]
        send = self._drops[held.fork] = SendDrop(held.ref, held.fork, held.owner)
        return [send]

    def _accept(self, fork: ForkId) -> list[Action]:
        maker = fork.worker
        if maker == self._me:
            return self._child_settled(fork)
        if maker in self._lost:
            return []
        send = self._accepts[fork] = SendAccept(fork, maker)
        return [send]

    def _child_settled(self, child: ForkId) -> list[Action]:
        made = self._children.pop(child, None)
        if made is None:
            return []
        parent = self._held[made.parent]
        parent.children.remove(child)
        return self._maybe_drop(parent)
