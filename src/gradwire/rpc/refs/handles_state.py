"""Holds on values, and what is to be done about them: the words of the counting of references.

Why they are said, and when, is in state.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from gradwire.ids import ForkId, RefId, WorkerId


class RefHandle(NamedTuple):
    """One RRef object of this worker; without a fork on the owner itself.

    `life` is the one of the owner's in which the value was made.
    """

    ref: RefId
    owner: WorkerId
    fork: ForkId | None
    life: int = 0


@dataclass(frozen=True, slots=True)
class SendFork:
    """Ask the owner to count our fork; always by the same number."""

    ref: RefId
    fork: ForkId
    to: WorkerId
    n: int


@dataclass(frozen=True, slots=True)
class AskMaker:
    """Ask the maker of our fork whether the value that its owner does not know may still come."""

    fork: ForkId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class SendAccept:
    """Tell the maker of our fork that its own may go."""

    fork: ForkId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class SendDrop:
    """Tell the owner that our fork is gone."""

    ref: RefId
    fork: ForkId
    to: WorkerId


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The owner has counted a fork that had to wait for it; never said of forks the owner made."""

    ref: RefId
    fork: ForkId


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The value will not be had: its owner was lost, or whoever passed it before it was counted.

    Without a fork it is about a value of our own, and for all holds on it.
    """

    ref: RefId
    fork: ForkId | None
    lost: WorkerId


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody holds the value of this worker: delete it, or discard it if it is still being made."""

    ref: RefId


Action = SendFork | AskMaker | SendAccept | SendDrop | Confirmed | Unreachable | Forget


class Verdict(Enum):
    """How an owner answers a Fork, and the maker of a fork whether its value may still come."""

    COUNTED = "counted"
    NOT_YET = "not yet"  # ask again; the owner should watch the fork's maker
    NEVER = "never"  # its maker was lost, and the value with it


@dataclass(frozen=True, slots=True)
class RefStatistics:
    """What a table remembers, in numbers; all are 0 when nothing is held anywhere."""

    owned: int
    """values that live here"""
    shared: int
    """of those, the ones that others hold"""
    forks: int
    """forks of them that others hold"""
    tombstones: int
    """forks of them that were dropped, may be asked for again, and must not be counted then"""
    held: int
    """forks that this worker holds"""
    pending_users: int
    """of those, the ones not counted yet"""
    pending_children: int
    """forks made here for others and not accepted yet"""
    unacknowledged: int
    """accepts and drops on their way"""
