"""What other workers say of references: that they hold a fork, no longer need ours, or let one go.

What is decided is in state.py; who may say what, in permissions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.messages import Done
from gradwire.agent.serving.dispatch import Lane, Payload
from gradwire.agent.serving.inbound_request import Source
from gradwire.ids import WorkerId
from gradwire.rpc.messages import Accept, Counted, Drop, Fork, QueryFork
from gradwire.rpc.refs import permissions
from gradwire.rpc.refs.handles_state import Action
from gradwire.rpc.refs.sender import CONTROL_SECONDS
from gradwire.rpc.refs.state import RefTable
from gradwire.wire.message import Message


@final
class RefServing:
    """For one worker; `perform` does what the table decides, without the lock."""

    def __init__(
        self,
        agent: Agent,
        table: RefTable,
        lock: RLock,
        check_room: Callable[[WorkerId], None],
        perform: Callable[[Sequence[Action]], None],
    ) -> None:
        self._agent, self._table, self._lock = agent, table, lock
        self._check_room, self._perform = check_room, perform
        agent.handle(Fork, self._serve_fork, Lane.SERVICE)
        agent.handle(Accept, self._serve_accept, Lane.SERVICE)
        agent.handle(Drop, self._serve_drop, Lane.SERVICE)
        agent.handle(QueryFork, self._serve_expected, Lane.SERVICE)
        agent.kinds.add(Counted)

    def _serve_fork(self, message: Fork, _: Payload, source: Source) -> None:
        self._check_room(source.worker)
        with self._lock:
            permissions.check_fork(self._table, message, source.worker, self._agent.directory.me.id)
            self._agent.check_asker(source)
            self._table.owned.settled_below(source.worker, message.floor)
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
            permissions.check_end(self._table, message, source.worker)
            actions = self._table.accept_arrived(message.fork)
        self._answer(source, Done())
        self._perform(actions)

    def _serve_drop(self, message: Drop, _: Payload, source: Source) -> None:
        with self._lock:
            permissions.check_end(self._table, message, source.worker)
            self._table.owned.settled_below(source.worker, message.floor)
            actions = self._table.owned.drop_arrived(message.ref, message.fork)
        self._answer(source, Done())
        self._perform(actions)

    def _answer(self, source: Source, message: Message) -> None:
        self._agent.answer(source, message, deadline=self._agent.clock.now() + CONTROL_SECONDS)
