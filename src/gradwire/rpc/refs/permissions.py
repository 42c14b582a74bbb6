"""Who may speak of which reference.

The numbers of references can be guessed. So a peer is asked for more than a number: it may use,
pass on and let go of what it holds itself, and keep what it makes under numbers of its own. What is
not its own is refused. It may say of a fork that a third worker made it, if that worker holds the
value: only that one could know better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.state import Member
from gradwire.agent.serving.peer_limits import over
from gradwire.errors import BadMessage, StaleIncarnation
from gradwire.ids import RefId, WorkerId
from gradwire.rpc.messages import Accept, Drop, Fork, Kept, Reference
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.state import RefTable


def check_kept(keep: Kept, source: WorkerId, me: WorkerId) -> None:
    """A call that leaves a value here, under a number of its caller's."""
    maker = source if keep.fork is None else keep.fork.worker
    if keep.ref.worker != source or maker != source or (keep.fork is None and source != me):
        raise BadMessage(f"w{source} wants to keep a value as {keep.ref}, which is not its own")


def check_passed(
    table: RefTable, references: Sequence[Reference], source: WorkerId, me: Member
) -> None:
    """References that came with a message."""
    for came in references:
        if came.fork.worker != source:
            raise BadMessage(f"w{source} passed {came.fork}, which it did not make")
        if came.owner == me.id and came.life < me.life:
            raise earlier_life(came.ref, me.name, came.life, me.life)
        if came.owner == me.id:
            check_use(table, came.ref, source)


def earlier_life(ref: RefId, owner: str, life: int, now: int) -> StaleIncarnation:
    """What is said of a reference to a value that its owner has lost."""
    return StaleIncarnation(
        f"{ref} belonged to life {life} of {owner}, which is in life {now}: it was started again",
        hint="make the value anew; gradwire.retrying(restore=…) is a place to do so",
    )


def check_life(directory: Directory, hold: RefHandle) -> None:
    """StaleIncarnation if the owner of a value was started again since it was made."""
    now = directory.life(hold.owner)
    if hold.life < now:
        raise earlier_life(hold.ref, directory.name(hold.owner), hold.life, now)


def check_use(table: RefTable, ref: RefId, source: WorkerId) -> None:
    """A value of ours that a peer wants to use."""
    if not table.owned.may_use(ref, source):
        raise BadMessage(f"w{source} does not hold {ref}", hint="only who holds it may use it")


def check_fork(table: RefTable, asked: Fork, source: WorkerId, me: WorkerId) -> None:
    """A fork of a value of ours that a peer wants to be counted; those of our own making are."""
    ref, fork = asked.ref, asked.fork
    is_another = table.owned.holder_of(ref, fork) not in (None, source)
    if is_another or fork.worker == me or not table.owned.may_use(ref, fork.worker):
        raise BadMessage(f"w{source} has no right to {fork} of {ref}: its maker does not hold it")


def check_end(table: RefTable, said: Accept | Drop, source: WorkerId) -> None:
    """What only the holder of a fork may say of it."""
    fork = said.fork
    holder = (
        table.owned.holder_of(said.ref, fork) if isinstance(said, Drop) else table.taker_of(fork)
    )
    if holder not in (None, source):
        raise BadMessage(f"w{source} speaks of {fork}, which is w{holder}'s")


@final
class Room:
    """How many references to our values a peer may hold.

    They are counted now and then: the more often, the fewer it may hold.
    """

    def __init__(self, table: RefTable, me: WorkerId, most: int) -> None:
        self._table, self._me, self._most = table, me, most
        self._asked = 0

    def check(self, peer: WorkerId) -> None:
        """OverLimit if a peer may not have one more."""
        self._asked += 1
        if self._asked % (1 + self._most // 64) or peer == self._me:
            return
        if self._table.owned.forks_of(peer) >= self._most:
            raise over("references", self._most)
