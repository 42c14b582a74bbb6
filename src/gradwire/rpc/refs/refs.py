"""The references of one worker: performs what the counting in state.py decides.

Values that live here are kept under their ids, each in a promise, because a reference may be used
before its value is made. Messages to other workers are sent from the service threads: a reference
may end anywhere, even in a garbage collection that interrupts code which holds the lock.

Note [A call may borrow a reference]
`rref.rpc_sync().method()` runs where the value lives, and the caller keeps its counted reference
until the answer is there. So the call only names the reference: nothing is counted, accepted or
dropped for it. This does not work if the caller does not wait (it may drop its reference before the
call begins), or if its reference is not counted yet (the owner may not know it). Then a counted
reference is sent, as in any other argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, final

from msgspec.structs import astuple

from gradwire.agent.agent import Agent, Outcome
from gradwire.agent.messages import Failure
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Source
from gradwire.agent.serving.peer_limits import over
from gradwire.current import current_inbound
from gradwire.errors import (
    BadMessage,
    CallTimeout,
    Cancelled,
    GradwireError,
    PeerLost,
    UsageError,
)
from gradwire.ids import ForkId, RefId, WorkerId, first_of
from gradwire.rpc.messages import Reference
from gradwire.rpc.recompute.checkpoint_run import current_checkpoint_run, waiting
from gradwire.rpc.refs.exchange import (
    RefSender,
    RefServer,
    check_incarnation,
    check_passed,
    check_use,
    stale_incarnation,
)
from gradwire.rpc.refs.finalizers import FinalizerQueue
from gradwire.rpc.refs.handles_state import (
    Action,
    BorrowedRef,
    Confirmed,
    ForgetValue,
    LentRef,
    RefHandle,
    RefStatistics,
    SendAccept,
    Sending,
    Unreachable,
    Verdict,
)
from gradwire.rpc.refs.message_refs import MessageRefs
from gradwire.rpc.refs.state import RefTable

_POLL_SECONDS = 0.01


class Value(NamedTuple):
    """What a reference points to."""

    value: object


class Raised(NamedTuple):
    """What the function that should have made the value raised instead.

    As data: an exception would keep the frames it was raised in alive, and all their values.
    """

    failure: Failure


Content = Value | Raised


@final
class Refs:
    """The references of one worker: its values, and its handles on values of other workers.

    `make` makes the public object for a handle, an RRef; this layer does not know that class.
    """

    def __init__(self, agent: Agent, make: Callable[[RefHandle], object]) -> None:
        self._agent, self.make = agent, make
        me = self._me = agent.directory.myself
        self._lock = agent.directory.lock
        self._counted = threading.Condition(self._lock)
        self._table = RefTable(me.id, first=first_of(me.incarnation))
        self._values: dict[RefId, Promise[Content]] = {}
        self.local = threading.local()
        """holds the MessageRefs of the message that each thread packs or unpacks"""
        finalizers = self._finalizers = FinalizerQueue(f"gradwire {me.name} refs", self.ended)
        self.watch, self.on_death = finalizers.watch, finalizers.on_death
        self.close = finalizers.close
        self._refused: dict[ForkId, Exception] = {}
        """why a value was not made, by the fork that its creator holds"""
        self._limit_checks = 0
        self.abandoned = False
        """whether this worker has ended all its handles on values of other workers"""
        self.piggybacked = RefServer(agent, self._table, self.check_limit, self._perform)
        agent.on_peer_lost(self._peer_lost)
        agent.on_peer_joined(self._peer_joined)
        self._sender = RefSender(agent, self._table, self._heard, self._peer_lost)

    # -- values of this worker

    def keep_here(self, content: Content | None = None) -> RefHandle:
        """A new value of this worker; without `content` it is made later."""
        handle: RefHandle | None = None
        promise: Promise[Content] = Promise()
        try:
            with self._lock:
                handle = self._table.create(self._me.id, self._me.incarnation)
                self._values[handle.ref] = promise
            if content is not None:
                promise.settle(content)
            return handle
        except BaseException:  # a signal handler has raised
            if handle is not None:
                self.ended(handle)
            raise

    def keep_elsewhere(self, owner: WorkerId) -> RefHandle:
        """A new value that a call is about to create on another worker."""
        handle, incarnation = None, self._agent.directory.incarnation(owner)
        try:
            with self._lock:
                handle = self._table.create(owner, incarnation)
        except BaseException:  # a signal handler has raised
            if handle is not None:
                self.creation_undone(handle)
            raise
        return handle

    def content(self, ref: RefId, peer: WorkerId | None = None) -> Promise[Content]:
        """The value of this worker that `ref` names, maybe not made yet, if `peer` may use it."""
        with self._lock:
            if peer is not None:
                check_use(self._table, ref, peer)
            kept = self._values.get(ref)
        if kept is None:
            raise UsageError(
                f"{ref} is not kept on {self._agent.directory.me.name} any more",
                hint="its last reference was dropped, or the connection that counted it was lost",
            )
        return kept

    def value_here(self, handle: RefHandle, deadline: float) -> object:
        """The value, on its owner, once made; raises what the function that makes it raised."""
        if handle.fork is not None:
            me, owner = self._agent.directory.me, self._agent.directory.name(handle.owner)
            raise UsageError(
                f"For {handle.ref}, can't call localValue() on user {me}. Call it on owner {owner}",
                hint="to_here() fetches a copy of the value",
            )
        return self._made(self.content(handle.ref), handle.ref, deadline)

    def value_for(self, peer: WorkerId, ref: RefId, deadline: float) -> object:
        """The same for a peer, which must hold the reference."""
        return self._made(self.content(ref, peer), ref, deadline)

    def _made(self, promise: Promise[Content], ref: RefId, deadline: float) -> object:
        agent = self._agent
        # Under a checkpoint every wait is numbered, even one for a value that is there: otherwise
        # the recomputation, which may find it there, would count fewer waits than the forward.
        if promise.settled and current_checkpoint_run() is None:
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

    # -- creating calls

    def check_limit(self, peer: WorkerId) -> None:
        """OverLimit if a peer holds as many references to values of this worker as it may.

        Not a PeerLimit: the table has the counts already, and a lost peer clears them there. It has
        to be scanned, so only every n-th request is checked; n grows with the limit.
        """
        most = self._agent.limits.references
        with self._lock:
            self._limit_checks += 1
            if self._limit_checks % (1 + most // 64) or peer == self._me.id:
                return
            if self._table.owned.forks_of(peer) >= most:
                raise over("references", most)

    def creation_arrived(self, ref: RefId, fork: ForkId | None, source: Source) -> Promise[Content]:
        """A call arrived whose result stays here; without a fork this worker is the caller.

        The promise must be settled even if no worker holds the reference any more.
        """
        with self._lock:
            self._agent.check_asker(source)
            if fork is None:  # `keep_here` has added it; if it is gone, so is the last reference
                promise, actions = self._values.get(ref) or Promise(), []
            else:
                promise = self._values.setdefault(ref, Promise())
                actions = self._table.owned.creation_arrived(ref, fork)
        self._perform(actions)
        return promise

    def creation_undone(self, handle: RefHandle) -> None:
        """The creating call was not sent."""
        if handle.fork is None:
            self.ended(handle)
            return
        with self._lock:
            self._table.creation_undone(handle.fork)

    def creation_abandoned(self, handle: RefHandle, answer: Promise[Outcome]) -> None:
        """The creating call was sent, but nobody gets the reference."""
        if handle.fork is not None:
            answer.on_settled(partial(self.creation_ended, handle.fork))
        self.ended(handle)

    def creation_ended(self, fork: ForkId, outcome: Outcome) -> None:
        """The creating call was answered, or given up."""
        table, is_late = self._table, isinstance(outcome, CallTimeout | Cancelled)
        ended = table.creation_timed_out if is_late else table.creation_answered
        is_lost = isinstance(outcome, PeerLost)
        with self._lock:
            actions = (table.creation_lost if is_lost else ended)(fork)
            if isinstance(outcome, Exception) and table.is_confirmed(fork):
                self._refused[fork] = outcome
        self._perform(actions)

    def _check_made(self, handle: RefHandle) -> None:
        """Raise what the owner refused the creating call with, if it did."""
        if handle.fork in self._refused:
            raise fresh(self._refused[handle.fork])

    # -- references in messages

    def maybe_lent(self, handle: RefHandle) -> LentRef | None:
        """What names a handle in a call that its caller waits for; None if a fork must be sent."""
        fork = handle.fork
        if fork is None or not self._table.is_confirmed(fork):  # no lock: it reads one dict entry
            return None
        self._check_made(handle)
        is_stale = handle.incarnation < self._agent.directory.incarnation(handle.owner)
        return None if is_stale else LentRef(handle)

    def borrowed(self, name: object) -> BorrowedRef:
        """The reference that a call names; called by the codec."""
        if type(name) is not list or [type(part) for part in name] != [int, int, int]:
            raise BadMessage(f"a call names {name!r:.100} where a reference was expected")
        worker, n, incarnation = name
        ref, inbound, me = RefId(worker, n), current_inbound(), self._me
        if inbound is None:
            raise BadMessage(f"{ref} was lent without a call")
        if incarnation < me.incarnation:
            raise stale_incarnation(ref, me.name, incarnation, me.incarnation)
        self.content(ref, inbound.worker)  # raises unless the caller holds it
        return BorrowedRef(RefHandle(ref, me.id, None, incarnation))

    def pack(self, handle: RefHandle) -> int:
        """Add a reference to the message being packed; returns its index."""
        message: MessageRefs = self.local.message
        check_incarnation(self._agent.directory, handle)
        self._wait_while(self._table.is_asking, handle, message.deadline)
        self._check_made(handle)
        fork = self._table.new_fork()
        # First: `pack_undone` then takes back what was packed when a signal handler raises.
        message.refs.append(Reference(handle.ref, handle.owner, fork, handle.incarnation))
        with self._lock:
            self._table.pack(handle, message.to, fork)
        return len(message.refs) - 1

    def wait_until_counted(self, handle: RefHandle, deadline: float) -> None:
        """Wait until the owner has counted a handle: a fetch may overtake the creating call."""
        check_incarnation(self._agent.directory, handle)
        self._wait_while(self._table.is_uncounted, handle, deadline)
        self._check_made(handle)

    def _wait_while(
        self, uncounted: Callable[[ForkId], bool], handle: RefHandle, deadline: float
    ) -> None:
        # `uncounted` is called without the lock: it reads one dict entry, and a counted fork stays
        # counted. A creation that times out just now turns to asking: `pack` checks that again.
        fork = handle.fork
        if fork is None or not uncounted(fork):
            return

        def sleep() -> None:
            left = min(max(0.0, deadline - self._agent.clock.now()), threading.TIMEOUT_MAX)
            with self._counted:
                self._counted.wait_for(lambda: not uncounted(fork), left)

        self._agent.wait(handle.owner, lambda: not uncounted(fork), sleep)
        if uncounted(fork):
            owner = self._agent.directory.name(handle.owner)
            raise CallTimeout(f"{owner} did not count {fork} of {handle.ref} in time")

    def wait_until_all_counted(self, references: Sequence[Reference], deadline: float) -> None:
        """The same for the references of one message."""
        for came in references:
            if came.owner != self._me.id:
                handle = RefHandle(came.ref, came.owner, came.fork, came.incarnation)
                self.wait_until_counted(handle, deadline)

    def pack_undone(self, references: Sequence[Reference]) -> None:
        """The message with these references was not sent."""
        with self._lock:
            undone = [self._table.pack_undone(made.ref, made.fork) for made in references]
        self._perform(chain.from_iterable(undone))

    def unpacking(
        self, references: Sequence[Reference], source: WorkerId, *, is_answered: bool = False
    ) -> MessageRefs:
        """A block in which `unpacked` returns these; those not asked for end with the block."""
        if not references:
            return MessageRefs(self.local, [])
        made: list[object] = []
        try:
            with self._lock:
                check_passed(self._table, references, source, self._agent.directory.myself)
            handles = self.arrived(references, is_answered=is_answered)
            made.extend(map(self.make, handles))
            return MessageRefs(self.local, made)
        except GradwireError:
            raise
        except BaseException:  # a signal handler has raised
            with self._lock:
                lost = references[len(made) :]
                actions = [self._table.arrived_for_nobody(*astuple(came)) for came in lost]
            self._perform(chain.from_iterable(actions))
            raise

    def unpacked(self, index: object) -> object:
        """The reference at this index, in the message being unpacked."""
        came: list[object] = self.local.message.refs
        if not isinstance(index, int) or not 0 <= index < len(came):
            raise BadMessage(f"a message names its reference {index!r} of {len(came)}")
        return came[index]

    def arrived(
        self, references: Sequence[Reference], *, is_answered: bool = False
    ) -> list[RefHandle]:
        """References arrived with a message. Must be called even if the message is then refused.

        `is_answered`: the answer will accept them; see Note [An answer accepts], exchange.py.
        """
        handles: list[RefHandle] = []
        actions: list[Action] = []
        with self._lock:
            for came in references:
                stale = came.incarnation < self._agent.directory.incarnation(came.owner)
                if not stale:  # the sender may know that the owner is back; else asking will tell
                    self._table.peer_joined(came.owner)
                handle, more = self._table.arrived(
                    came.ref, came.owner, came.fork, came.incarnation, is_stale=stale
                )
                handles.append(handle)
                if handle.fork is None:
                    self._values.setdefault(handle.ref, Promise())
                    if is_answered:
                        more = [action for action in more if not isinstance(action, SendAccept)]
                actions += more
        self._perform(actions)
        return handles

    def release(self, references: Sequence[Reference]) -> None:
        """References arrived with a message that is of no use any more: end them."""
        for handle in self.arrived(references):
            self.ended(handle)

    # -- the end of handles

    def unmade(self, handle: RefHandle) -> None:
        """A signal handler has raised before there was an object for a handle, or just after.

        Elsewhere the end of a handle may be reported twice. One on the owner is only counted, so it
        stays, and the value with it.
        """
        if handle.fork is not None:
            self.ended(handle)

    def ended(self, handle: RefHandle) -> None:
        """A handle has ended."""
        with self._lock:
            actions = self._table.handle_ended(handle)
            if handle.fork is not None:
                self._refused.pop(handle.fork, None)
        self._perform(actions)

    def is_confirmed(self, handle: RefHandle) -> bool:
        """Whether the owner has counted a handle."""
        with self._lock:
            return handle.fork is None or self._table.is_confirmed(handle.fork)

    def wait_until_settled(self, deadline: float) -> bool:
        """Wait until all forks held here are counted and all made here accepted; False if late."""
        with self._counted:
            while self._table.unsettled():
                if self._agent.clock.now() >= deadline:
                    return False
                self._counted.wait(_POLL_SECONDS)
        return True

    def abandon(self) -> None:
        """End all handles on values of other workers: this worker shuts down."""
        self.abandoned = True
        with self._lock:
            actions = self._table.abandon()
        self._perform(actions)

    @property
    def pending(self) -> bool:
        """Whether messages about references are still unanswered, or to be sent."""
        with self._lock:
            is_pending = self._table.pending() or self._finalizers.is_busy
            return is_pending and not self._finalizers.closed

    def leaks(self) -> list[str]:
        """The forks of this worker's values that other workers still hold, as text."""
        with self._lock:
            leaks = self._table.owned.leaks()
        return [f"{ref} as {fork} on {self._agent.directory.name(w)}" for ref, fork, w in leaks]

    def statistics(self) -> RefStatistics:
        """The sizes of the table."""
        with self._lock:
            return self._table.statistics()

    def _peer_lost(self, worker: WorkerId, _: PeerLost) -> None:
        with self._lock:
            actions = self._table.peer_lost(worker)
        # Not on the thread that reads: the end of a value may run a user's finalizer.
        self._agent.dispatch.service.submit(partial(self._perform, actions))

    def _peer_joined(self, worker: WorkerId) -> None:
        with self._lock:
            self._table.peer_joined(worker)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ForgetValue(ref):
                    with self._lock:
                        forgotten = self._values.pop(ref, None)
                    del forgotten  # outside the lock: this may end other references
                case Confirmed():
                    with self._counted:
                        self._counted.notify_all()
                case Unreachable():
                    self._report_unreachable(action)
                case _:
                    self._sender.send_soon(action)

    def _report_unreachable(self, value: Unreachable) -> None:
        """Wake the threads that wait for a value that will not come."""
        with self._counted:
            self._counted.notify_all()
            awaited = self._values.get(value.ref) if value.fork is None else None
        if awaited is not None:
            lost = f"{self._agent.directory.name(value.lost)} was lost before its call arrived"
            error = PeerLost(f"{value.ref} will not be made: {lost}")
            awaited.settle(Raised(self._agent.describe(error)))

    def _heard(self, sending: Sending, verdict: Verdict | None) -> None:
        with self._lock:
            actions = self._table.answered(sending, verdict)
            self._counted.notify_all()  # the fork may also have been given up meanwhile
        self._perform(actions)
