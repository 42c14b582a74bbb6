"""Values that come home with a call, and how its caller learns that they have.

Note [An answer accepts]: a reference that is passed to its owner needs the fork it was made from
until the owner holds the value itself. The answer to the call says so, and is lost only together
with the peer. What is not answered in that way, such as a call that failed or was given up, is
accepted by messages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import final

from gradwire.ids import ForkId, WorkerId
from gradwire.rpc.messages import Accept, Reference
from gradwire.rpc.refs import permissions
from gradwire.rpc.refs.handles_state import Action, SendAccept
from gradwire.rpc.refs.state import RefTable


@final
class Acknowledging:
    """For one worker; `perform` does what the table decides, without the lock."""

    def __init__(
        self,
        me: WorkerId,
        table: RefTable,
        lock: RLock,
        perform: Callable[[Sequence[Action]], None],
    ) -> None:
        self._me, self._table, self._lock, self._perform = me, table, lock, perform

    def came_home(self, references: Sequence[Reference]) -> list[ForkId]:
        """Those of a call's references that its answer accepts."""
        me = self._me
        return [came.fork for came in references if came.owner == me != came.fork.worker]

    def left(self, forks: Sequence[ForkId]) -> None:
        """The answer that accepts them has left."""
        with self._lock:
            for fork in forks:
                self._table.accept_acknowledged(fork)

    def without_answer(self, references: Sequence[Reference]) -> None:
        """No answer will accept those of a call's references that came home."""
        with self._lock:
            actions = self._table.owed_accepts(self.came_home(references))
        self._perform(actions)

    def heard(self, forks: Sequence[ForkId], source: WorkerId) -> None:
        """The answer to a call of ours accepts forks that we made for it."""
        actions: list[Action] = []
        with self._lock:
            for fork in forks:
                permissions.check_end(self._table, Accept(fork), source)
                actions += self._table.accept_arrived(fork)
        self._perform(actions)


def but_accepts(actions: Sequence[Action]) -> list[Action]:
    """What is to be done now, if an answer accepts."""
    return [action for action in actions if not isinstance(action, SendAccept)]
