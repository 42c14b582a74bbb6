"""What one worker remembers of one forward pass."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch

from gradwire.autograd.graph import ROOM, MaybeRecv, Walk
from gradwire.autograd.lineage import Lineage
from gradwire.autograd.torch_private import Node
from gradwire.ids import ContextId, EdgeId, PassId, WorkerId, spoken_context


class Sent(NamedTuple):
    """A crossing that left here.

    `token` is what its Send returned: to run from the token is to run the Send.
    """

    edge: EdgeId
    peer: WorkerId
    lineage: Lineage
    depth: int
    token: torch.Tensor

    @property
    def node(self) -> Node:
        """The Send."""
        assert self.token.grad_fn is not None
        return self.token.grad_fn


class Received(NamedTuple):
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


@final
@dataclass(slots=True)
class Context:
    """Its edges, in the order they were made, and the gradients of `backward(context, roots)`.

    `lock` guards the lists and the walk; it is held while nodes are made, never while waiting.
    """

    id: ContextId
    recv_origin: MaybeRecv
    source: WorkerId | None = None
    """the peer that made it known here; None if it was opened here"""
    lock: threading.Lock = field(default_factory=threading.Lock)
    sent: list[Sent | None] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    broken: str | None = None
    """why nothing more can be differentiated here"""
    ended: set[PassId] = field(default_factory=set)
    passes: int = 0
    """how many that others began were heard of"""
    called: set[WorkerId] = field(default_factory=set)
    callers: set[WorkerId] = field(default_factory=set)
    """the peers that have had something done here in it"""
    edges_of: Counter[WorkerId] = field(default_factory=Counter)
    """how many of its edges came from each peer"""
    gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    walk: Walk = field(init=False)
    _latest: int = 0

    def __post_init__(self) -> None:
        self.walk = Walk(self.recv_origin)

    def __str__(self) -> str:
        return spoken_context(self.id)

    def next_depth(self, below: int) -> int:
        """The depth of a new edge that depends on others down to `below`; with the lock held.

        Deeper than the edges sent before, too: see Note [The order of waiting], graph.py.
        """
        self._latest = max(below, min(self._latest, ROOM // 2)) + 1
        return self._latest

    def known_workers(self) -> set[WorkerId]:
        """The workers that were called from here, or answered with what has a graph."""
        with self.lock:
            return self.called | {sent.peer for sent in self.sent if sent is not None}

    def withdraw(self, edge: EdgeId) -> None:
        """Forget a crossing that never left. Its number is not used again."""
        with self.lock:
            self.sent[edge.n] = None
