"""The types of reference counting: handles, and the actions, verdicts and counts of a table.

state.py says when each is used, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gradwire.ids import ForkId, RefId, WorkerId


class RefHandle(NamedTuple):
    """What one RRef object of this worker stands for. On the owner it has no fork."""

    ref: RefId
    owner: WorkerId
    fork: ForkId | None
    incarnation: int = 0
    """that of the owner when the value was made"""


class LentRef:
    """A handle in a call to its owner; see Note [A call may borrow a reference], refs.py."""

    __slots__ = ("handle",)

    def __init__(self, handle: RefHandle) -> None:
        self.handle = handle

    def pack(self) -> list[int]:
        """Its name, as it is sent; called by the codec."""
        handle = self.handle
        return [handle.ref.worker, handle.ref.n, handle.incarnation]


class BorrowedRef(LentRef):
    """A LentRef as it arrives on the owner. It cannot be passed on: the codec matches types."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SendFork:
    """Ask the owner to count our fork; it answers a verdict. A repetition has the same number."""

    ref: RefId
    fork: ForkId
    to: WorkerId
    n: int


@dataclass(frozen=True, slots=True)
class AskMaker:
    """Ask the maker of our fork whether a value unknown to its owner may still be created."""

    fork: ForkId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class SendAccept:
    """Tell the maker of our fork that it may release the fork it was made from."""

    fork: ForkId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class SendDrop:
    """Tell the owner that we no longer hold our fork."""

    ref: RefId
    fork: ForkId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The owner has counted our fork. Not reported for forks that the owner made."""

    ref: RefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The value cannot be reached: its owner was lost, or the maker of a fork not yet counted.

    Without a fork: a value of this worker will never be created; this concerns all its handles.
    """

    ref: RefId
    fork: ForkId | None
    lost: WorkerId


@dataclass(frozen=True, slots=True)
class ForgetValue:
    """Nobody holds a value of this worker: delete it, or discard it once it is made."""

    ref: RefId


Sending = SendFork | AskMaker | SendAccept | SendDrop
Action = Sending | Confirmed | Unreachable | ForgetValue


class Verdict(Enum):
    """The answer of an owner to a Fork, and of the maker of a fork to an Expected."""

    COUNTED = "counted"
    NOT_YET = "not yet"  # ask again
    NEVER = "never"  # the value is gone, or its creating call is lost


@dataclass(frozen=True, slots=True)
class RefStatistics:
    """The sizes of a table; all are 0 when no reference is left anywhere."""

    owned: int  # values that live here
    shared: int  # of those, the ones that other workers hold
    forks: int  # forks of them that other workers hold
    tombstones: int  # dropped forks of them, while a late request must not count them again
    held: int  # forks that this worker holds
    pending_users: int  # of those, the ones not counted yet
    pending_children: int  # forks made here for other workers and not accepted yet
    unacknowledged: int  # Accepts and Drops that are not answered yet
