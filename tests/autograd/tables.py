"""Tables of one worker, without the worker."""

from __future__ import annotations

from gradwire.agent.peers.directory import Directory, Member
from gradwire.autograd.graph.context import Contexts


def contexts_of(me: int) -> Contexts:
    """The contexts of w0 or w1 in a world of two."""
    return Contexts(Directory(me, [Member(n, f"w{n}", f"w{n}", 0) for n in range(2)]))
