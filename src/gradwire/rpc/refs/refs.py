"""References of one worker: the driver of the counting in state.py.

Values that live here are kept under their ids, each in a promise, as a reference may be used before
its value is made. Messages to other workers leave from the service threads: a reference may end
anywhere, also in the middle of a garbage collection that interrupted code holding our lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never, final

from gradwire.agent.agent import Agent, Outcome
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Source
from gradwire.errors import BadMessage, CallTimeout, Cancelled, PeerLost, UsageError
from gradwire.ids import ForkId, RefId, WorkerId, first_of
from gradwire.rpc.messages import Reference
from gradwire.rpc.recompute.session import current_session, waiting
from gradwire.rpc.refs import permissions
from gradwire.rpc.refs.accepting import Acknowledging, but_accepts
from gradwire.rpc.refs.borrow import Lending
from gradwire.rpc.refs.contents import Content, Raised
from gradwire.rpc.refs.finalizers import FinalizerQueue
from gradwire.rpc.refs.handles_state import (
    Action,
    AskMaker,
    Confirmed,
    Forget,
    RefHandle,
    RefStatistics,
    SendAccept,
    SendDrop,
    SendFork,
    Unreachable,
    Verdict,
)
from gradwire.rpc.refs.packing import Packing, Unpacking
from gradwire.rpc.refs.sender import RefSender, Sending
from gradwire.rpc.refs.server import RefServing
from gradwire.rpc.refs.state import RefTable

_LOOK_AGAIN_SECONDS = 0.01


Made = Callable[[RefHandle], object]
"""Makes the public object for a hold: an RRef, which refs knows nothing of."""


@final
class Refs:
    """See the top of this file."""

    def __init__(self, agent: Agent) -> None:
        me = self._me = agent.directory.myself
        self._agent = agent
        self._lock = agent.directory.lock
        self._counted = threading.Condition(self._lock)
        self._table = RefTable(me.id, first=first_of(me.life))
        self._values: dict[RefId, Promise[Content]] = {}
        self._local = threading.local()
        self._finalizers = FinalizerQueue(f"gradwire {me.name} refs", self.ended)
        self.watch, self.on_death = self._finalizers.watch, self._finalizers.on_death
        self._closed = False
        self.accepting = Acknowledging(me.id, self._table, self._lock, self._perform)
        self.lending = Lending(agent.directory, self._table, self.content)
        self._room = permissions.Room(self._table, me.id, agent.limits.references)
        self.abandoned = False
        """whether this worker has let go of all that lives elsewhere"""
        self.make: Made
        RefServing(agent, self._table, self._lock, self.check_room, self._perform)
        agent.on_peer_lost(self._peer_lost)
        agent.on_peer_joined(self._peer_joined)
        self._sender = RefSender(agent, self._heard, self._owed, self._floor, self._peer_lost)

    # -- values of this worker

    def keep_here(self, content: Content | None = None) -> RefHandle:
        """A new value of this worker's own; made later if there is no content yet."""
        with self._lock:
            hold = self._table.create(self._me.id, self._me.life)
            promise = self._values[hold.ref] = Promise()
        if content is not None:
            promise.settle(content)
        return hold

    def keep_elsewhere(self, owner: WorkerId) -> RefHandle:
        """A new value that a call is about to make on another worker."""
        with self._lock:
            return self._table.create(owner, self._agent.directory.life(owner))

    def content(self, ref: RefId, peer: WorkerId | None = None) -> Promise[Content]:
        """The value of a reference that this worker owns. It may be used before it is made.

        For a peer, if it holds the reference.
        """
        with self._lock:
            if peer is not None:
                permissions.check_use(self._table, ref, peer)
            kept = self._values.get(ref)
        if kept is None:
            raise UsageError(
                f"{ref} is not kept on {self._agent.directory.me.name} any more",
                hint="its last reference was dropped, or the connection over which it was counted",
            )
        return kept

    def value_here(self, hold: RefHandle, deadline: float) -> object:
        """The value of a reference of our own, once made; raises what its function raised."""
        if hold.fork is not None:
            directory = self._agent.directory
            me, owner = directory.me, directory.name(hold.owner)
            raise UsageError(
                f"For {hold.ref}, can't call localValue() on user {me}. Call it on owner {owner}",
                hint="to_here() fetches a copy of the value",
            )
        return self._made(self.content(hold.ref), hold.ref, deadline)

    def value_for(self, peer: WorkerId, ref: RefId, deadline: float) -> object:
        """The same, for a peer that must hold the reference."""
        return self._made(self.content(ref, peer), ref, deadline)

    def _made(self, promise: Promise[Content], ref: RefId, deadline: float) -> object:
        agent = self._agent
        if promise.settled and current_session() is None:
            content = promise.wait()
        else:
            try:
                with waiting():
                    left = deadline - agent.clock.now()
                    agent.wait(None, lambda: promise.settled, lambda: promise.wait(left))
                content = promise.wait()
            except TimeoutError:
                name = agent.directory.me.name
                raise CallTimeout(f"the value of {ref} was not made on {name} in time") from None
        if isinstance(content, Raised):
            raise agent.revive(content.failure)
        return content.value

    # -- a creating call

    def check_room(self, peer: WorkerId) -> None:
        """OverLimit if a peer holds as many references to our values as it may."""
        with self._lock:
            self._room.check(peer)

    def creation_arrived(self, ref: RefId, fork: ForkId | None, source: Source) -> Promise[Content]:
        """A call has come whose result stays here; without a fork, from this worker itself.

        The promise is to be settled even if nobody holds the reference any more.
        """
        with self._lock:
            self._agent.check_asker(source)
            promise = self._values.setdefault(ref, Promise())
            actions = [] if fork is None else self._table.owned.creation_arrived(ref, fork)
        self._perform(actions)
        return promise

    def creation_undone(self, hold: RefHandle) -> None:
        """The creating call did not leave."""
        if hold.fork is None:
            self.ended(hold)
            return
        with self._lock:
            self._table.creation_undone(hold.fork)

    def creation_ended(self, fork: ForkId, outcome: Outcome) -> None:
        """The creating call was answered, or given up."""
        table, is_late = self._table, isinstance(outcome, CallTimeout | Cancelled)
        ended = table.creation_timed_out if is_late else table.creation_answered
        with self._lock:
            actions = (table.creation_lost if isinstance(outcome, PeerLost) else ended)(fork)
        self._perform(actions)

    # -- references on their way

    def packing(self, to: WorkerId, deadline: float) -> Packing:
        """Inside the block `pack` adds to this list; if it raises, all of them are taken back."""
        return Packing(self._local, self.pack_undone, to, deadline)

    def pack(self, hold: RefHandle) -> int:
        """A reference is part of the value being packed; its place in the list."""
        packing: Packing = self._local.packing
        to, packed, deadline = packing.to, packing.packed, packing.deadline
        permissions.check_life(self._agent.directory, hold)
        self._wait_while(self._table.is_asking, hold, deadline)
        with self._lock:
            fork = self._table.pack(hold, to)
        packed.append(Reference(hold.ref, hold.owner, fork, hold.life))
        return len(packed) - 1

    def wait_until_counted(self, hold: RefHandle, deadline: float) -> None:
        """A value is fetched when its owner has counted us: a fetch may overtake its making."""
        permissions.check_life(self._agent.directory, hold)
        self._wait_while(self._table.is_uncounted, hold, deadline)

    def _wait_while(
        self, uncounted: Callable[[ForkId], bool], hold: RefHandle, deadline: float
    ) -> None:
        fork = hold.fork
        if fork is None or not uncounted(fork):
            return
        self._agent.wait(
            hold.owner,
            lambda: not uncounted(fork),
            lambda: self._sleep_while(uncounted, fork, deadline),
        )
        if uncounted(fork):
            owner = self._agent.directory.name(hold.owner)
            raise CallTimeout(f"{owner} did not count {fork} of {hold.ref} in time")

    def _sleep_while(
        self, uncounted: Callable[[ForkId], bool], fork: ForkId, deadline: float
    ) -> None:
        left = min(max(0.0, deadline - self._agent.clock.now()), threading.TIMEOUT_MAX)
        with self._counted:
            self._counted.wait_for(lambda: not uncounted(fork), left)

    def wait_until_all_counted(self, references: Sequence[Reference], deadline: float) -> None:
        """Of references that came with one message."""
        for came in references:
            if came.owner != self._agent.directory.me.id:
                hold = RefHandle(came.ref, came.owner, came.fork, came.life)
                self.wait_until_counted(hold, deadline)

    def pack_undone(self, references: Sequence[Reference]) -> None:
        """What was packed did not leave."""
        me = self._agent.directory.me.id
        actions: list[Action] = []
        with self._lock:
            for made in references:
                hold = RefHandle(made.ref, made.owner, None if made.owner == me else made.fork)
                actions += self._table.pack_undone(hold, made.fork)
        self._perform(actions)

    def unpacking(
        self, references: Sequence[Reference], source: WorkerId, *, is_answered: bool = False
    ) -> Unpacking:
        """Inside the block `unpacked` gives these; one that nobody asks for ends with it."""
        if not references:
            return Unpacking(self._local, [])
        with self._lock:
            permissions.check_passed(self._table, references, source, self._agent.directory.myself)
        holds = self.arrived(references, is_answered=is_answered)
        return Unpacking(self._local, [self.make(hold) for hold in holds])

    def unpacked(self, place: object) -> object:
        """The reference at this place of the list, in the value being unpacked."""
        came: list[object] = self._local.unpacking
        if not isinstance(place, int) or not 0 <= place < len(came):
            raise BadMessage(f"a message names its reference {place!r} of {len(came)}")
        return came[place]

    def arrived(
        self, references: Sequence[Reference], *, is_answered: bool = False
    ) -> list[RefHandle]:
        """References came with a message: all of them, even if it is then refused.

        For `is_answered` see Note [An answer accepts], accepting.py.
        """
        holds: list[RefHandle] = []
        actions: list[Action] = []
        with self._lock:
            for came in references:
                stale = came.life < self._agent.directory.life(came.owner)
                if not stale:  # who passes it on may have better news of its owner; or asking tells
                    self._table.peer_joined(came.owner)
                hold, more = self._table.arrived(
                    came.ref, came.owner, came.fork, came.life, is_stale=stale
                )
                holds.append(hold)
                if hold.fork is None:
                    self._values.setdefault(hold.ref, Promise())
                    if is_answered:
                        more = but_accepts(more)
                actions += more
        self._perform(actions)
        return holds

    def release(self, references: Sequence[Reference]) -> None:
        """References came with a message that nobody wants any more."""
        for hold in self.arrived(references):
            self.ended(hold)

    # -- the end of references

    def ended(self, hold: RefHandle) -> None:
        """A hold is over."""
        with self._lock:
            actions = self._table.hold_ended(hold)
        self._perform(actions)

    def is_confirmed(self, hold: RefHandle) -> bool:
        """Whether the owner has counted it."""
        with self._lock:
            return hold.fork is None or self._table.is_confirmed(hold.fork)

    def wait_until_settled(self, deadline: float) -> bool:
        """Until no fork of ours is still to be counted, nor one made here to be accepted."""
        with self._counted:
            while self._table.unsettled():
                if self._agent.clock.now() >= deadline:
                    return False
                self._counted.wait(_LOOK_AGAIN_SECONDS)
        return True

    def abandon(self) -> None:
        """End every hold on values of others: this worker leaves."""
        self.abandoned = True
        with self._lock:
            actions = self._table.abandon()
        self._perform(actions)

    @property
    def pending(self) -> bool:
        """Whether something is still to be confirmed."""
        with self._lock:
            return not self._closed and (self._table.pending() or self._finalizers.is_busy)

    def leaks(self) -> list[str]:
        """The forks of our values that others still hold, for people."""
        with self._lock:
            leaks = self._table.owned.leaks()
        return [f"{ref} as {fork} on {self._agent.directory.name(w)}" for ref, fork, w in leaks]

    def statistics(self) -> RefStatistics:
        """How much is remembered."""
        with self._lock:
            return self._table.statistics()

    def close(self) -> None:
        """Stop the finalizer queue."""
        self._closed = True
        self._finalizers.close()

    # -- what becomes of other workers

    def _peer_lost(self, worker: WorkerId, _: PeerLost) -> None:
        with self._lock:
            actions = self._table.peer_lost(worker)
        # Off the thread that reads: a value that ends may run a finalizer of the user's.
        self._agent.dispatch.service.submit(partial(self._perform, actions))

    def _peer_joined(self, worker: WorkerId) -> None:
        with self._lock:
            self._table.peer_joined(worker)

    # -- performing

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendFork() | AskMaker() | SendAccept() | SendDrop():
                    self._sender.send_soon(action)
                case Forget(ref):
                    with self._lock:
                        forgotten = self._values.pop(ref, None)
                    del forgotten  # outside the lock: it may be the end of other references
                case Confirmed():
                    with self._counted:
                        self._counted.notify_all()
                case Unreachable(ref, fork, lost):
                    self._broken(ref, fork, lost)
                case _:
                    assert_never(action)

    def _broken(self, ref: RefId, fork: ForkId | None, lost: WorkerId) -> None:
        """Whoever waits for a value that will not come is told."""
        with self._counted:
            self._counted.notify_all()
            awaited = self._values.get(ref) if fork is None else None
        if awaited is not None:
            name = self._agent.directory.name(lost)
            error = PeerLost(f"{ref} will not be made: {name} was lost before its call came")
            awaited.settle(Raised(self._agent.describe(error)))

    def _heard(self, sending: Sending, verdict: Verdict | None) -> None:
        actions: list[Action] = []
        with self._lock:
            match sending:
                case SendFork() if verdict is not None:
                    actions = self._table.fork_answered(sending.fork, verdict)
                    actions += self._table.fork_unwanted(sending, verdict)
                case AskMaker() if verdict is not None:
                    actions = self._table.maker_answered(sending.fork, verdict)
                case SendAccept():
                    self._table.accept_acknowledged(sending.fork)
                case SendDrop():
                    self._table.drop_acknowledged(sending.fork)
                case _:
                    pass  # no answer to a Fork: it stays owed
            self._counted.notify_all()  # also of a fork that was let go of meanwhile
        self._perform(actions)

    def _owed(self) -> list[Action]:
        with self._lock:
            return self._table.unacknowledged()

    def _floor(self, owner: WorkerId) -> int:
        with self._lock:
            return self._table.floor(owner)
