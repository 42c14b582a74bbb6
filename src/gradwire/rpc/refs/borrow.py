"""References lent to the owner of their value for the duration of one call.

`rref.rpc_sync().method()` runs where the value lives, and the caller keeps its counted reference
until the answer is there. So the call only names the reference: nothing is counted, accepted or
dropped for it.

This does not work if the caller does not wait (it may drop its reference before the call begins),
or if its reference is not counted yet (the owner may not know it). Then a counted reference
is sent, as in any other argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.current import current_inbound
from gradwire.errors import BadMessage
from gradwire.ids import RefId, WorkerId
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.permissions import stale_incarnation
from gradwire.rpc.refs.state import RefTable


@final
class LentRef:
    """A reference on its way to the owner of its value; the caller holds it and waits."""

    __slots__ = ("handle",)

    def __init__(self, handle: RefHandle) -> None:
        self.handle = handle

    def pack(self) -> list[int]:
        """Its name, as it is sent; called by the codec."""
        handle = self.handle
        return [handle.ref.worker, handle.ref.n, handle.incarnation]


@final
class BorrowedRef:
    """A lent reference as it arrives on the owner. It cannot be passed on."""

    __slots__ = ("handle",)

    def __init__(self, handle: RefHandle) -> None:
        self.handle = handle


@final
class Lending:
    """Makes LentRefs and BorrowedRefs for one worker.

    `check` raises if a peer does not hold a value of this worker.
    """

    def __init__(
        self,
        directory: Directory,
        table: RefTable,
        check: Callable[[RefId, WorkerId], object],
    ) -> None:
        self._directory, self._table, self._check = directory, table, check

    def maybe_lent(self, handle: RefHandle) -> LentRef | None:
        """The LentRef for a call that the caller waits for; None if a reference has to be sent.

        Takes no lock: is_lendable reads one dict entry.
        """
        fork = handle.fork
        if fork is None or not self._table.is_lendable(fork):
            return None
        is_stale = handle.incarnation < self._directory.incarnation(handle.owner)
        return None if is_stale else LentRef(handle)

    def borrowed(self, name: object) -> BorrowedRef:
        """The reference that a call names; called by the codec."""
        if type(name) is not list or [type(part) for part in name] != [int, int, int]:
            raise BadMessage(f"a call names {name!r:.100} where a reference was expected")
        worker, n, incarnation = name
        ref, inbound, me = RefId(worker, n), current_inbound(), self._directory.myself
        if inbound is None:
            raise BadMessage(f"{ref} was lent without a call")
        if incarnation < me.incarnation:
            raise stale_incarnation(ref, me.name, incarnation, me.incarnation)
        self._check(ref, inbound.worker)
        return BorrowedRef(RefHandle(ref, me.id, None, incarnation))
