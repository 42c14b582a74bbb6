"""The messages about references that other workers send: Fork, Accept, Drop, Expected, and answers.

state.py decides what they change; permissions.py decides which peer may send which.

Note [An answer accepts]
A reference that is passed to its owner depends on the fork it was made from until the owner holds
the value itself. The answer to the call carries this acknowledgement ("piggybacked"): it is lost
only together with the peer. If a call fails or is given up, separate Accept messages are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.messages import Done
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.ids import ForkId, WorkerId
from gradwire.rpc.messages import Accept, Counted, Drop, Fork, QueryFork, Reference
from gradwire.rpc.refs import permissions
from gradwire.rpc.refs.handles_state import Action, SendAccept
from gradwire.rpc.refs.sender import CONTROL_SECONDS
from gradwire.rpc.refs.state import RefTable
from gradwire.wire.message import Message


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
        perform: Callable[[Sequence[Action]], None],
    ) -> None:
        self._agent, self._table, self._lock = agent, table, agent.directory.lock
        self._me, self._check_limit, self._perform = agent.directory.me.id, check_limit, perform
        agent.handle(Fork, self._serve_fork, Lane.SERVICE)
        agent.handle(Accept, self._serve_accept, Lane.SERVICE)
        agent.handle(Drop, self._serve_drop, Lane.SERVICE)
        agent.handle(QueryFork, self._serve_expected, Lane.SERVICE)
        agent.kinds.add(Counted)

    def _serve_fork(self, message: Fork, _: Payload, source: Source) -> None:
        self._check_limit(source.worker)
        with self._lock:
            permissions.check_fork(self._table, message, source.worker, self._me)
            self._agent.check_asker(source)
            self._table.owned.forget_acked(source.worker, message.acked_below)
            verdict = self._table.owned.fork_arrived(
                message.ref, message.fork, source.worker, message.n
            )
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
        with self._lock:
            holder = self._table.owned.holder_of(message.ref, message.fork)
            permissions.check_end(message.fork, holder, source.worker)
            self._table.owned.forget_acked(source.worker, message.acked_below)
            actions = self._table.owned.drop_arrived(message.ref, message.fork)
        self._answer(source, Done())
        self._perform(actions)

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
        actions: list[Action] = []
        with self._lock:
            for fork in forks:
                actions += self._accepted(fork, source)
        self._perform(actions)

    def _accepted(self, fork: ForkId, by: WorkerId) -> list[Action]:
        permissions.check_end(fork, self._table.taker_of(fork), by)
        return self._table.accept_arrived(fork)
