"""What one worker remembers of one forward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, final

import msgspec
import torch

from gradwire.autograd.graph.lineage import Lineage
from gradwire.autograd.graph.walk import ROOM, Walk
from gradwire.ids import ContextId, EdgeId, PassId, WorkerId, spoken_context
from gradwire.torch_private import Node


class Sent(msgspec.Struct, frozen=True):
    """A crossing that left here.

    `token` is what its Send returned: to run from the token is to run the Send.
    """

    edge: EdgeId
    peer: WorkerId
    lineage: Lineage
    depth: int
    token: torch.Tensor
    node: Node
    """the Send"""


class Received(msgspec.Struct, frozen=True):
    """A crossing that arrived here.

    `anchor` is the Recv's own input, which only a plain backward() reaches.
    """

    edge: EdgeId
    lineage: Lineage
    node: Node
    anchor: torch.Tensor


@dataclass(slots=True)
class Join:
    """One node that stands for a set of sends: a Recv has one link, however many it needs."""

    edges: int
    depth: int
    token: torch.Tensor


class Ending(Protocol):
    """See backward/rollback.py."""

    def wait(self, deadline: float, seconds: float, lost_seconds: float) -> str:
        """Who has not confirmed by then that it was put back, if anybody."""

    def drop(self) -> None:
        """The context is closed."""


@final
@dataclass(slots=True, weakref_slot=True, eq=False)
class Context:
    """Its edges, in the order they were made, and the gradients of `backward(context, roots)`.

    Note [A context is not locked]: nodes are made while edges are recorded, and what makes objects
    may run the collector, and with it a finalizer of the user's that sends something itself. So no
    lock is held there. Each change is one step for the interpreter, or does no harm if it is done
    twice: two threads that walk over one node find the same, two Joins may stand for one set, two
    edges may have one depth. `lock`, the worker's, is for the passes and for counting.
    """

    id: ContextId
    walk: Walk
    lock: threading.RLock
    source: WorkerId | None = None
    """the peer that made it known here; None if it was opened here"""
    sent: list[Sent | None] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    broken: str | None = None
    """why nothing more can be differentiated here"""
    endings: dict[PassId, Ending] = field(default_factory=dict)
    """failed passes of our own that some worker has not put back yet"""
    ended: set[PassId] = field(default_factory=set)
    passes: int = 0
    """how many that others began were heard of"""
    called: set[WorkerId] = field(default_factory=set)
    callers: set[WorkerId] = field(default_factory=set)
    """the peers that have had something done here in it"""
    edges_of: dict[WorkerId, int] = field(default_factory=dict)
    """how many of its edges came from each peer"""
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    _latest: int = 0
    _numbers: Iterator[int] = field(default_factory=count)

    def __str__(self) -> str:
        return spoken_context(self.id)

    def next_edge(self) -> int:
        """The number of a new edge, whose place in `sent` is empty until it is there."""
        self.sent.append(None)  # first: there are never fewer places than numbers
        return next(self._numbers)

    def next_depth(self, below: int) -> int:
        """The depth of a new edge that depends on others down to `below`.

        Deeper than the edges sent before, too: see Note [The order of waiting], walk.py.
        """
        depth = self._latest = max(below, min(self._latest, ROOM // 2)) + 1
        return depth

    def known_workers(self) -> set[WorkerId]:
        """The workers that were called from here, or answered with what has a graph."""
        return self.called | {sent.peer for sent in self.sent if sent is not None}

    def withdraw(self, edge: EdgeId) -> None:
        """Forget a crossing that never left. Its number is not used again."""
        self.sent[edge.n] = None
