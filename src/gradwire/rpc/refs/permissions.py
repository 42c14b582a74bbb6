"""Permissions: which peer may use, pass on, accept or drop which reference.

The ids of references can be guessed, so an id alone gives no rights. A peer may use, pass on and
drop what it holds, and keep results under its own ids. It may claim that a third worker made its
fork, if that worker holds the value: only that worker could contradict.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.agent.peers.directory import Directory, Member
from gradwire.errors import BadMessage, StaleIncarnation
from gradwire.ids import ForkId, RefId, WorkerId
from gradwire.rpc.messages import Fork, Kept, Reference
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.state import RefTable


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
