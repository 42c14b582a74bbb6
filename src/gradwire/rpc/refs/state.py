"""Distributed reference counting: which workers hold a value, and when its owner may drop it.

Rules of this file:
  1. Pure. No torch, no threads, no clock: it never sees a value, only ids.
  2. Inputs are methods, outputs are actions. The caller performs them, in order.
  3. It does not resend. `unacknowledged()` lists what to send again.

A value lives on its *owner*. A *handle* is one RRef object; its end is reported once. Handles on
the owner are a plain count. Every handle elsewhere is one *fork* with its own id, even if a worker
already holds the same value: forks are never shared, so each is made, counted and dropped once.
A fork is made from another one (its parent) by the worker that passes the reference (its maker).
The owner's half is in owner_state.py, the holder's in this file, the messages in handles_state.py.

Messages may be dropped, duplicated, delayed or reordered. The calls and answers that carry
references arrive at most once, may be late, and are lost only together with a peer. Why no value is
dropped too early or kept for ever:

  * A fork is released only when it is counted, its handle has ended, and every fork made from it
    is accepted. So while a fork is not counted yet, its parent keeps the value alive.
  * A Drop is only sent once the owner has counted the fork, so it never overtakes the counting.
  * A repeated Fork must not count again what was dropped: see Note [A Fork is counted once],
    owner_state.py. Forks that the owner made need no registration and no tombstone.

Note [A fork may come before its value]
The creator may pass on a reference while the creating call is still on its way. So a Fork, or the
reference itself, can reach the owner first. Such a Fork is answered NOT_YET and asked again: if it
were counted, a delayed duplicate for a deleted value would be, too. If the creating call or the
value is lost with a connection, the creator keeps nothing of the fork, and answers so when asked
(AskMaker). If the reference itself reaches the owner first, the owner waits for the value: messages
that carry references are never duplicated, so it cannot be stale. Workers other than the creator
may pass on only counted forks: if one names a value that the owner does not know, the value has
been deleted, and the answer is NEVER.

Note [A creation that timed out is asked about]
Its call may still be on the way. An owner that does not know the value would ignore a Drop, and the
late call would then count a fork that nobody drops. So the creator asks like any other holder, and
drops the fork once it is counted.

What the file relies on: the owner reports `creation_arrived` for every creating call, even if it
refuses the call then; a receiver reports `arrived` for every reference of a call, even if it
refuses the call; a lost peer is reported also to workers that have no connection to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import final

from gradwire.errors import BadMessage, PeerLost, UsageError
from gradwire.ids import ForkId, RefId, WorkerId
from gradwire.rpc.refs.handles_state import (
    Action,
    AskMaker,
    Confirmed,
    RefHandle,
    RefStatistics,
    SendAccept,
    SendDrop,
    SendFork,
    Sending,
    Unreachable,
    Verdict,
)
from gradwire.rpc.refs.owner_state import Owned


class _Stage(Enum):
    """How far the counting of a fork held here has come."""

    CREATING = "creating"  # its creating call is not answered yet
    ASKING = "asking"  # its Fork is not answered yet
    COUNTED = "counted"
    UNREACHABLE = "unreachable"  # for ever


_WAITING = (_Stage.CREATING, _Stage.ASKING)


@dataclass(slots=True)
class _HeldFork:
    """A fork that this worker holds, until it is dropped."""

    ref: RefId
    fork: ForkId
    owner: WorkerId
    stage: _Stage
    asked: SendFork | None = None  # the request to count it, while that is not answered
    alive: bool = True  # whether its handle has not ended
    # Forks that were made from it and are not accepted yet, and the worker each was made for.
    children: dict[ForkId, WorkerId] = field(default_factory=dict)
    lost: WorkerId | None = None  # the worker whose loss made it unreachable


@final
class RefTable:
    """The references of one worker: its own values, and the forks that it holds and makes.

    Ids start at `first`, which must be above all ids of the worker's earlier incarnations.
    """

    def __init__(self, me: WorkerId, *, first: int = 0) -> None:
        self._me = me
        self._next = first
        self._held: dict[ForkId, _HeldFork] = {}
        self._children: dict[ForkId, _HeldFork] = {}
        """the parent of each fork that was made from one held here and is not accepted yet"""
        self._asked: defaultdict[WorkerId, dict[int, SendFork]] = defaultdict(dict)
        """Forks that are not answered yet, by owner and number; see `acked_below`"""
        self._next_request = first
        self._owed: dict[SendAccept | SendDrop, None] = {}
        """those that are not acknowledged yet, in order"""
        self._lost: set[WorkerId] = set()
        self.owned = Owned(me, self._lost)
        """the values of this worker, and their holders"""

    def __repr__(self) -> str:
        return f"<RefTable of w{self._me}: {self.statistics()}>"

    # Making, passing and ending handles.

    def create(self, owner: WorkerId, incarnation: int = 0) -> RefHandle:
        """A new value: here at once, on another worker when the creating call arrives there."""
        ref = RefId(self._me, self._number())
        fork = None if owner == self._me else ForkId(self._me, self._number())
        handle = RefHandle(ref, owner, fork, incarnation)
        # Last, and with no call after the store: a signal handler may raise after each call.
        if fork is None:
            self.owned.made(ref)
        else:
            self._held[fork] = _HeldFork(ref, fork, owner, _Stage.CREATING)
        return handle

    def new_fork(self) -> ForkId:
        """A fork that is about to be packed."""
        return ForkId(self._me, self._number())

    def pack(self, handle: RefHandle, to: WorkerId, child: ForkId | None = None) -> ForkId:
        """A new fork, about to be sent to the worker `to`."""
        child = child or self.new_fork()
        if handle.fork is None:
            self.owned.passed_on(handle.ref, child, to)
        else:
            parent = self._children[child] = self._passable_fork(handle.ref, handle.fork)
            parent.children[child] = to
        return child

    def pack_undone(self, ref: RefId, child: ForkId) -> list[Action]:
        """The message with this fork was certainly not sent."""
        # One of the two does nothing: the fork was made either of our own value or of a fork.
        return self.owned.drop_arrived(ref, child) + self.accept_arrived(child)

    def arrived(
        self,
        ref: RefId,
        owner: WorkerId,
        fork: ForkId,
        incarnation: int = 0,
        *,
        is_stale: bool = False,
    ) -> tuple[RefHandle, list[Action]]:
        """A reference arrived from the maker of its fork; stale if its owner was restarted."""
        if owner == self._me:
            returned = self.owned.returned(ref, fork) + self._accept(fork)
            return RefHandle(ref, owner, None, incarnation), returned
        if fork in self._held:
            raise BadMessage(f"{fork} arrived twice")
        stage = _Stage.COUNTED if fork.worker == owner else _Stage.ASKING
        held = self._held[fork] = _HeldFork(ref, fork, owner, stage)
        actions: list[Action] = []
        if is_stale or owner in self._lost:
            actions = self._mark_unreachable(held, owner)
        elif stage is _Stage.ASKING:
            actions = self._ask(held)
        return RefHandle(ref, owner, fork, incarnation), actions

    def arrived_for_nobody(
        self, ref: RefId, owner: WorkerId, fork: ForkId, incarnation: int
    ) -> list[Action]:
        """A reference arrived, but an interrupt left it without an RRef: end what there is of it.

        One that came back to its owner is left out: what is counted there has no id.
        """
        if owner == self._me:
            return []
        held, actions = self._held.get(fork), []
        if held is None:
            actions = self.arrived(ref, owner, fork, incarnation)[1]
        elif held.stage is _Stage.ASKING:  # perhaps the request was not sent
            self._ask_no_more(held)
            actions = self._ask(held)
        return actions + self._ended(self._held[fork])

    def handle_ended(self, handle: RefHandle) -> list[Action]:
        """The RRef object is gone. Must be reported once."""
        if handle.fork is None:
            return self.owned.handle_ended(handle.ref)
        held = self._held.get(handle.fork)
        return [] if held is None else self._ended(held)

    def abandon(self) -> list[Action]:
        """End all handles on values of other workers; uncounted ones are dropped later."""
        return [action for held in list(self._held.values()) for action in self._ended(held)]

    # The end of a creating call.

    def creation_answered(self, fork: ForkId) -> list[Action]:
        """The owner answered the creating call: it has counted the fork, or never will."""
        # Counted in both cases: the owner ignores the Drop of a fork that it does not know.
        return self._counted(held) if (held := self._maybe_in(_Stage.CREATING, fork)) else []

    def creation_timed_out(self, fork: ForkId) -> list[Action]:
        """The caller no longer waits for the answer."""
        # See Note [A creation that timed out is asked about].
        return self._ask(held) if (held := self._maybe_in(_Stage.CREATING, fork)) else []

    def creation_lost(self, fork: ForkId) -> list[Action]:
        """The creating call was lost with the connection to the owner."""
        held = self._maybe_in(_Stage.CREATING, fork)
        return self._mark_unreachable(held, held.owner) if held else []

    def creation_undone(self, fork: ForkId) -> None:
        """The creating call was certainly not sent."""
        held = self._held.pop(fork, None)
        assert held is None or not held.children, f"{fork} was passed on before its creating call"

    # Messages of other workers.

    def answered(self, sent: Sending, verdict: Verdict | None) -> list[Action]:
        """A message of ours was answered, with the verdict if the answer has one."""
        match sent:
            case SendAccept() | SendDrop():
                self.acknowledged(sent)
            case SendFork() if verdict is not None:
                return self.fork_answered(sent.fork, verdict) + self.fork_unwanted(sent, verdict)
            case AskMaker() if verdict is not None:
                return self.maker_answered(sent.fork, verdict)
            case _:
                pass  # a Fork or AskMaker without a verdict: it stays unanswered
        return []

    def fork_answered(self, fork: ForkId, verdict: Verdict) -> list[Action]:
        """The owner answered our Fork."""
        held = self._maybe_in(_Stage.ASKING, fork)
        if held is None:
            return []
        if verdict is Verdict.NOT_YET:
            return [] if fork.worker == self._me else [AskMaker(fork, fork.worker)]
        if verdict is Verdict.COUNTED:
            return self._counted(held)
        return self._mark_unreachable(held, fork.worker)

    def maker_answered(self, fork: ForkId, verdict: Verdict) -> list[Action]:
        """The maker of our fork answered whether the value may still be created."""
        held = self._maybe_in(_Stage.ASKING, fork)
        if held is None or verdict is not Verdict.NEVER:
            return []
        return self._mark_unreachable(held, held.owner)

    def fork_unwanted(self, asked: SendFork, verdict: Verdict) -> list[Action]:
        """The owner answered; drop the fork if it was counted but given up here meanwhile."""
        held = self._held.get(asked.fork)
        is_wanted = held is not None and held.stage is not _Stage.UNREACHABLE
        if is_wanted or verdict is not Verdict.COUNTED or asked.to in self._lost:
            return []
        return self._owe(SendDrop(asked.ref, asked.fork, asked.to))

    def accept_arrived(self, fork: ForkId) -> list[Action]:
        """The holder of a fork that we made no longer needs its parent."""
        parent = self._children.pop(fork, None)
        if parent is None:
            return []
        del parent.children[fork]
        return self._maybe_drop(parent)

    def acknowledged(self, sent: SendAccept | SendDrop) -> None:
        """Our Accept or Drop was answered."""
        self._owed.pop(sent, None)

    def owed_accepts(self, forks: Sequence[ForkId]) -> list[Action]:
        """The Accepts for these forks that are not acknowledged yet."""
        return [send for fork in forks if (send := SendAccept(fork, fork.worker)) in self._owed]

    def peer_lost(self, worker: WorkerId) -> list[Action]:
        """A peer is gone, with what it held, what it owned, and the messages on their way to it."""
        self._lost.add(worker)
        self._owed = dict.fromkeys(send for send in self._owed if send.to != worker)
        actions = self.owned.holder_lost(worker)
        for held in list(self._held.values()):
            # A creating call may be sent after the loss; it is settled when that call ends.
            if held.owner == worker and held.stage is not _Stage.CREATING:
                actions += self._mark_unreachable(held, worker)
        for child in [child for child in self._children if self.taker_of(child) == worker]:
            actions += self.accept_arrived(child)
        return actions

    def peer_joined(self, worker: WorkerId) -> None:
        """A lost peer's number is in use again; nothing of its old incarnation may be reported."""
        self._lost.discard(worker)

    # Queries.

    def is_confirmed(self, fork: ForkId) -> bool:
        """Whether a fork is counted and its handle has not ended: it keeps the value alive."""
        held = self._maybe_in(_Stage.COUNTED, fork)
        return held is not None and held.alive

    def is_asking(self, fork: ForkId) -> bool:
        """Whether the owner has still to count a fork; until then it cannot be passed on."""
        return self._maybe_in(_Stage.ASKING, fork) is not None

    def is_uncounted(self, fork: ForkId) -> bool:
        """Whether the owner may not know the value yet; until then it cannot be fetched."""
        held = self._held.get(fork)
        return held is not None and held.stage in _WAITING

    def pending(self) -> bool:
        """Whether a graceful shutdown has to wait for messages about references."""
        return self.unsettled() or bool(self._owed)

    def unacknowledged(self) -> list[Action]:
        """All that was sent and not answered: to be sent again."""
        return [*(fork for asked in self._asked.values() for fork in asked.values()), *self._owed]

    def may_come(self, fork: ForkId, asker: WorkerId) -> Verdict:
        """Whether a value may still be created: NOT_YET while we keep the fork for `asker`."""
        return Verdict.NOT_YET if self.taker_of(fork) == asker else Verdict.NEVER

    def taker_of(self, fork: ForkId) -> WorkerId | None:
        """The worker for which we made a fork, if it has not accepted it yet."""
        parent = self._children.get(fork)
        return None if parent is None else parent.children[fork]

    def acked_below(self, owner: WorkerId) -> int:
        """No request to this owner below this number will be repeated."""
        return next(iter(self._asked[owner]), self._next_request)

    def unsettled(self) -> bool:
        """Whether a fork held here is not counted yet, or one made here not accepted."""
        waiting = any(fork.stage in _WAITING for fork in self._held.values())
        return waiting or bool(self._children)

    def statistics(self) -> RefStatistics:
        """The sizes of the table."""
        values, held = self.owned.values.values(), self._held.values()
        return RefStatistics(
            owned=len(values),
            shared=sum(bool(value.forks) for value in values),
            forks=sum(len(value.forks) for value in values),
            tombstones=sum(len(value.requested - value.forks.keys()) for value in values),
            held=len(held),
            pending_users=sum(fork.stage in _WAITING for fork in held),
            pending_children=len(self._children),
            unacknowledged=len(self._owed),
        )

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    # The forks that are held here.

    def _maybe_in(self, stage: _Stage, fork: ForkId) -> _HeldFork | None:
        held = self._held.get(fork)
        return held if held is not None and held.stage is stage else None

    def _passable_fork(self, ref: RefId, fork: ForkId) -> _HeldFork:
        held = self._held.get(fork)
        if held is None or not held.alive:
            raise UsageError(
                f"{ref} was dropped by w{self._me} and cannot be passed on",
                hint="pass references on before shutdown()",
            )
        if held.lost is not None:
            lost = f"w{held.lost} or the connection to it was lost"
            raise PeerLost(f"{ref} cannot be passed on: {lost}")
        if held.stage is _Stage.ASKING:
            raise UsageError(
                f"{ref} cannot be passed on before w{held.owner} has counted {fork}",
                hint="wait until confirmed_by_owner() is true",
            )
        return held

    def _ask(self, held: _HeldFork) -> list[Action]:
        n, self._next_request = self._next_request, self._next_request + 1
        held.stage = _Stage.ASKING
        held.asked = self._asked[held.owner][n] = SendFork(held.ref, held.fork, held.owner, n)
        return [held.asked]

    def _ask_no_more(self, held: _HeldFork) -> None:
        if held.asked is not None:
            del self._asked[held.owner][held.asked.n]
            held.asked = None

    def _counted(self, held: _HeldFork) -> list[Action]:
        self._ask_no_more(held)
        held.stage = _Stage.COUNTED
        confirmed: list[Action] = [Confirmed(held.ref, held.fork)] if held.alive else []
        return confirmed + self._accept(held.fork) + self._maybe_drop(held)

    def _mark_unreachable(self, held: _HeldFork, lost: WorkerId) -> list[Action]:
        if held.stage is _Stage.UNREACHABLE:
            return []
        self._ask_no_more(held)
        # The maker may not know of the loss: without an Accept it would keep the parent for ever.
        accepted = self._accept(held.fork) if held.stage is _Stage.ASKING else []
        for child in held.children:
            del self._children[child]
        held.children.clear()
        held.stage = _Stage.UNREACHABLE
        held.lost = lost
        if held.alive:
            return [Unreachable(held.ref, held.fork, lost), *accepted]
        del self._held[held.fork]
        return accepted

    def _ended(self, held: _HeldFork) -> list[Action]:
        held.alive = False
        if held.stage is _Stage.UNREACHABLE:
            del self._held[held.fork]
            return []
        return self._maybe_drop(held)

    def _maybe_drop(self, held: _HeldFork) -> list[Action]:
        if held.alive or held.children or held.stage is not _Stage.COUNTED:
            return []
        del self._held[held.fork]
        return self._owe(SendDrop(held.ref, held.fork, held.owner))

    def _accept(self, fork: ForkId) -> list[Action]:
        maker = fork.worker
        if maker == self._me:
            return self.accept_arrived(fork)
        return [] if maker in self._lost else self._owe(SendAccept(fork, maker))

    def _owe(self, send: SendAccept | SendDrop) -> list[Action]:
        self._owed[send] = None
        return [send]
