"""The messages of reference counting: sent, and sent again until they are answered; and served.

state.py decides what they change. All of them are idempotent, so repeating does no harm. The table
knows what is still unanswered and is asked before each repetition. A worker that refuses
connections, or that could not be reached for CONTROL_SECONDS, is reported lost: where there is no
connection, none can break.

Note [Permissions]
The ids of references can be guessed, so an id alone gives no rights. A peer may use, pass on and
drop what it holds, and keep results under its own ids. It may claim that a third worker made its
fork, if that worker holds the value: only that worker could contradict.

Note [An answer accepts]
A reference that is passed to its owner depends on the fork it was made from until the owner holds
the value itself. The answer to the call carries this acknowledgement ("piggybacked"): it is lost
only together with the peer. If a call fails or is given up, separate Accept messages are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import final

from gradwire.agent.agent import Agent, Answer, OnLost, Outcome
from gradwire.agent.messages import Done
from gradwire.agent.peers.directory import Directory, Member
from gradwire.agent.requests.timer import Resender
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import BadMessage, GradwireError, PeerLost, StaleIncarnation, UsageError
from gradwire.ids import ForkId, RefId, WorkerId
from gradwire.rpc.messages import Accept, Counted, Drop, Fork, Kept, QueryFork, Reference
from gradwire.rpc.refs.handles_state import (
    Action,
    AskMaker,
    RefHandle,
    SendAccept,
    SendDrop,
    SendFork,
    Sending,
    Verdict,
)
from gradwire.rpc.refs.state import RefTable
from gradwire.wire.message import Message

CONTROL_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 0.05
_SEND_AGAIN_SECONDS = 1.0
_AWAITED_SECONDS = 60.0
_MOST_DROPPED = 256
"""Forks that one Drop names, if its limits allow it: a program may end a thousand at once."""
_DROP_BYTES = 64
"""more than one of them takes"""

_Entry = tuple[Sending, float | None]
"""a message, and when its receiver first answered NOT_YET"""
Heard = Callable[[Sending, Verdict | None], None]
"""Called when a message was answered, with the verdict if the answer has one."""


@final
class RefSender:
    """Sends one worker's messages about references; `lost` is called for unreachable peers."""

    def __init__(self, agent: Agent, table: RefTable, heard: Heard, lost: OnLost) -> None:
        self._agent, self._table, self._heard, self._lost = agent, table, heard, lost
        self._lock = agent.directory.lock
        limits = agent.limits
        self._most = max(1, min(_MOST_DROPPED, limits.head // _DROP_BYTES, limits.elements // 8))
        self._soon: dict[WorkerId, deque[_Entry]] = {}
        self._unreached: dict[WorkerId, float] = {}
        """when sending to a worker first failed"""
        self._resender: Resender[_Entry] = Resender(agent.timer, self._send_again)

    def send_soon(self, sending: Sending, since: float | None = None) -> None:
        """Send on a service thread: the caller may hold locks, or be in a garbage collection."""
        # At most one thread per peer: a message may bring a hundred references.
        peer, mine = sending.to, deque([(sending, since)])
        with self._lock:
            waiting = self._soon.setdefault(peer, mine)
            if waiting is not mine:
                waiting.append((sending, since))
                return
        if not self._agent.dispatch.service.submit(partial(self._send_all, peer)):
            del self._soon[peer]  # this worker has shut down

    def _send_all(self, peer: WorkerId) -> None:
        while True:
            with self._lock:
                waiting = self._soon[peer]
                if not waiting:
                    del self._soon[peer]
                    return
                entries = _next_message(waiting, self._most)
            self._send(peer, entries)

    def _send(self, peer: WorkerId, entries: list[_Entry]) -> None:
        with self._lock:
            acked_below = self._table.acked_below(peer)
        message = _message([sending for sending, _ in entries], acked_below)
        first, others = str(entries[0][0]), len(entries) - 1
        text = f"{first} and {others} more" if others else first
        limit = self._agent.clock.now() + CONTROL_SECONDS
        try:
            _, answer = self._agent.request(peer, message, deadline=limit, description=text)
        except UsageError:  # this worker has shut down
            return
        except GradwireError as error:
            self._not_sent(peer, entries, error)
            return
        with self._lock:
            self._unreached.pop(peer, None)
        answer.on_settled(partial(self._answered, entries))

    def _not_sent(self, peer: WorkerId, entries: list[_Entry], error: GradwireError) -> None:
        """Report a peer that cannot be reached as lost, unless it has connected to us meanwhile."""
        now = self._agent.clock.now()
        with self._lock:
            failing_since = self._unreached.setdefault(peer, now)
        given_up = isinstance(error, PeerLost) or now - failing_since >= CONTROL_SECONDS
        lost = partial(self._lost, peer, PeerLost(str(error)))
        if not (given_up and self._agent.connections.unreached(peer, lost)):
            for entry in entries:
                self._send_later(*entry, _SEND_AGAIN_SECONDS)

    def _answered(self, entries: list[_Entry], outcome: Outcome) -> None:
        for entry in entries:
            self._answered_one(*entry, outcome)

    def _answered_one(self, sending: Sending, since: float | None, outcome: Outcome) -> None:
        if not isinstance(outcome, Answer):
            self._send_later(sending, since, _SEND_AGAIN_SECONDS)
            return
        said = outcome.message
        verdict = Verdict(said.verdict) if isinstance(said, Counted) else None
        if isinstance(sending, SendFork) and verdict is Verdict.NOT_YET:
            now = self._agent.clock.now()
            waited = 0.0 if since is None else now - since
            if waited < _AWAITED_SECONDS:
                self._send_later(sending, now - waited, _ASK_AGAIN_SECONDS + waited / 10)
                if waited:  # most values are there at the second request: do not ask the maker yet
                    self._heard(sending, verdict)
                return
            verdict = Verdict.NEVER
        self._heard(sending, verdict)

    def _send_later(self, sending: Sending, since: float | None, seconds: float) -> None:
        if not isinstance(sending, AskMaker):  # which is sent again with the next Fork
            self._resender.keep((sending, since), seconds)

    def _send_again(self, due: list[_Entry]) -> None:
        with self._lock:
            owed = set(self._table.unacknowledged())  # a lost peer is owed nothing any more
        for sending, since in due:
            if sending in owed:
                self.send_soon(sending, since)


def _next_message(waiting: deque[_Entry], most: int) -> list[_Entry]:
    """Take what one message can say: Drops that follow each other share one."""
    taken = [waiting.popleft()]
    while waiting and len(taken) < most:
        if not isinstance(taken[0][0], SendDrop) or not isinstance(waiting[0][0], SendDrop):
            break
        taken.append(waiting.popleft())
    return taken


def _message(sendings: list[Sending], acked_below: int) -> Message:
    match sendings[0]:
        case SendFork(ref, fork, _, n):
            return Fork(ref, fork, n, acked_below)
        case AskMaker(fork, _):
            return QueryFork(fork)
        case SendAccept(fork, _):
            return Accept(fork)
        case SendDrop():
            dropped = [(each.ref, each.fork) for each in sendings if isinstance(each, SendDrop)]
            return Drop(dropped, acked_below)


@final
class RefServer:
    """Serves the messages about references for one worker, and the Accepts that answers carry.

    `perform` is called without the lock: it may send, and run finalizers.
    """

    def __init__(
        self,
        agent: Agent,
        table: RefTable,
        check_limit: Callable[[WorkerId], None],
        perform: Callable[[Iterable[Action]], None],
    ) -> None:
        self._agent, self._table, self._lock = agent, table, agent.directory.lock
        self._me, self._check_limit, self._perform = agent.directory.me.id, check_limit, perform
        agent.handle(Fork, self._serve_fork, Lane.SERVICE)
        agent.handle(Accept, self._serve_accept, Lane.SERVICE)
        agent.handle(Drop, self._serve_drop, Lane.SERVICE)
        agent.handle(QueryFork, self._serve_expected, Lane.SERVICE)
        agent.kinds.add(Counted)

    def maybe_handle(self, ref: RefId) -> RefHandle | None:
        """A new handle on a value of this worker; None if its last reference is gone."""
        me = self._agent.directory.myself
        with self._lock:
            is_there = self._table.owned.maybe_another(ref)
        return RefHandle(ref, me.id, None, me.incarnation) if is_there else None

    def _serve_fork(self, message: Fork, _: Payload, source: Source) -> None:
        self._check_limit(source.worker)
        with self._lock:
            check_fork(self._table, message, source.worker, self._me)
            self._agent.check_asker(source)
            self._table.owned.forget_acked(source.worker, message.acked_below)
            asked = (message.ref, message.fork, source.worker, message.n)
            verdict = self._table.owned.fork_arrived(*asked)
        self._answer(source, Counted(verdict.value))

    def _serve_expected(self, message: QueryFork, _: Payload, source: Source) -> None:
        with self._lock:
            verdict = self._table.may_come(message.fork, source.worker)
        self._answer(source, Counted(verdict.value))

    def _serve_accept(self, message: Accept, _: Payload, source: Source) -> None:
        with self._lock:
            actions = self._accepted(message.fork, source.worker)
        self._answer(source, Done())
        self._perform(actions)

    def _serve_drop(self, message: Drop, _: Payload, source: Source) -> None:
        owned = self._table.owned
        with self._lock:
            for ref, fork in message.dropped:
                check_end(fork, owned.holder_of(ref, fork), source.worker)
            owned.forget_acked(source.worker, message.acked_below)
            actions = [owned.drop_arrived(ref, fork) for ref, fork in message.dropped]
        self._answer(source, Done())
        self._perform(chain.from_iterable(actions))

    def _answer(self, source: Source, message: Message) -> None:
        self._agent.answer(source, message, deadline=self._agent.clock.now() + CONTROL_SECONDS)

    # -- Accepts that answers carry, on the callee; see Note [An answer accepts]

    def accepted_by_answer(self, references: Sequence[Reference]) -> list[ForkId]:
        """The forks, among a call's references, that its answer accepts: those of our values."""
        me = self._me
        return [came.fork for came in references if came.owner == me != came.fork.worker]

    def answer_sent(self, forks: Sequence[ForkId]) -> None:
        """The answer that accepts these forks has left."""
        with self._lock:
            for fork in forks:
                self._table.acknowledged(SendAccept(fork, fork.worker))

    def send_separately(self, references: Sequence[Reference]) -> None:
        """No answer will accept a call's references: send an Accept for each."""
        with self._lock:
            actions = self._table.owed_accepts(self.accepted_by_answer(references))
        self._perform(actions)

    # -- and on the caller

    def answer_arrived(self, forks: Sequence[ForkId], source: WorkerId) -> None:
        """The answer to a call of this worker accepts forks that were made for it."""
        with self._lock:
            accepted = [self._accepted(fork, source) for fork in forks]
        self._perform(chain.from_iterable(accepted))

    def _accepted(self, fork: ForkId, by: WorkerId) -> list[Action]:
        check_end(fork, self._table.taker_of(fork), by)
        return self._table.accept_arrived(fork)


# -- see Note [Permissions]


def check_kept(keep: Kept, source: WorkerId, me: WorkerId) -> None:
    """A call may keep its result here only under an id of its caller."""
    maker = source if keep.fork is None else keep.fork.worker
    if keep.ref.worker != source or maker != source or (keep.fork is None and source != me):
        raise BadMessage(f"w{source} wants to keep a value as {keep.ref}, which is not its own")


def check_passed(
    table: RefTable, references: Sequence[Reference], source: WorkerId, me: Member
) -> None:
    """A peer may pass on forks that it made, of values that it may use."""
    for came in references:
        if came.fork.worker != source:
            raise BadMessage(f"w{source} passed {came.fork}, which it did not make")
        if came.owner == me.id and came.incarnation < me.incarnation:
            raise stale_incarnation(came.ref, me.name, came.incarnation, me.incarnation)
        if came.owner == me.id:
            check_use(table, came.ref, source)


def stale_incarnation(ref: RefId, owner: str, then: int, now: int) -> StaleIncarnation:
    """The error for a reference to a value of an earlier incarnation of its owner."""
    return StaleIncarnation(
        f"{ref} belongs to incarnation {then} of {owner}, which was restarted as incarnation {now}",
        hint="make the value anew; gradwire.retrying(restore=…) is a place to do so",
    )


def check_incarnation(directory: Directory, handle: RefHandle) -> None:
    """StaleIncarnation if the owner was restarted since the value was made."""
    now = directory.incarnation(handle.owner)
    if handle.incarnation < now:
        raise stale_incarnation(handle.ref, directory.name(handle.owner), handle.incarnation, now)


def check_use(table: RefTable, ref: RefId, source: WorkerId) -> None:
    """A peer may use a value of this worker if it holds a reference."""
    if not table.owned.may_use(ref, source):
        raise BadMessage(
            f"w{source} does not hold {ref}",
            hint="only a worker that holds a reference may use its value",
        )


def check_fork(table: RefTable, asked: Fork, source: WorkerId, me: WorkerId) -> None:
    """A peer may ask to count a fork that a holder made; forks made here are counted already."""
    ref, fork = asked.ref, asked.fork
    is_another = table.owned.holder_of(ref, fork) not in (None, source)
    if is_another or fork.worker == me or not table.owned.may_use(ref, fork.worker):
        raise BadMessage(f"w{source} has no right to {fork} of {ref}: its maker does not hold it")


def check_end(fork: ForkId, holder: WorkerId | None, source: WorkerId) -> None:
    """Only the holder of a fork, if we know one, may accept or drop it."""
    if holder not in (None, source):
        raise BadMessage(f"w{source} may not end {fork}, which w{holder} holds")
