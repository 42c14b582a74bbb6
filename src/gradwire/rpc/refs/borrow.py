"""References that are lent: to the owner of their value, for as long as a call takes.

A method runs where its value lives, for somebody who holds a reference and waits for the answer
with it in hand. The value is kept all the time by what is counted already. So the call only names
the reference, and nothing is counted, accepted or dropped for it.

Who does not wait may drop its reference before the call has begun; and what is not counted yet may
be named before it is there. Then a reference travels, as in any other argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.current import current_inbound
from gradwire.errors import BadMessage
from gradwire.ids import RefId, WorkerId
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.permissions import earlier_life
from gradwire.rpc.refs.state import RefTable


@final
class LentRef:
    """A reference on its way to the owner of its value. Whoever made it holds it, and waits."""

    __slots__ = ("hold",)

    def __init__(self, hold: RefHandle) -> None:
        self.hold = hold

    def pack(self) -> list[int]:
        """Its name; the codec calls this."""
        hold = self.hold
        return [hold.ref.worker, hold.ref.n, hold.life]


@final
class Borrowed:
    """The same on the owner. It cannot be passed on."""

    __slots__ = ("hold",)

    def __init__(self, hold: RefHandle) -> None:
        self.hold = hold


@final
class Lending:
    """For one worker; `check` raises if a peer does not hold a value of ours."""

    def __init__(
        self,
        directory: Directory,
        table: RefTable,
        check: Callable[[RefId, WorkerId], object],
    ) -> None:
        self._directory, self._table, self._check = directory, table, check

    def maybe_lent(self, hold: RefHandle) -> LentRef | None:
        """What stands for a reference in a call that is waited for; None if it must travel itself.

        Without the lock: what is asked of the table is one look into it.
        """
        fork = hold.fork
        if fork is None or not self._table.is_lendable(fork):
            return None
        return None if hold.life < self._directory.life(hold.owner) else LentRef(hold)

    def borrowed(self, said: object) -> Borrowed:
        """What a call has named; the codec calls this."""
        if type(said) is not list or [type(part) for part in said] != [int, int, int]:
            raise BadMessage(f"a call names {said!r:.100} where a reference was due")
        worker, n, life = said
        ref, inbound, me = RefId(worker, n), current_inbound(), self._directory.myself
        if inbound is None:
            raise BadMessage(f"{ref} was lent without a call")
        if life < me.life:
            raise earlier_life(ref, me.name, life, me.life)
        self._check(ref, inbound.worker)
        return Borrowed(RefHandle(ref, me.id, None, life))
