"""The first message each way after the handshake: what two workers should know of each other.

Pure: what to say, and whether to believe what was said. That the peer has this name is settled by
the handshake, as far as it can be.
"""

from __future__ import annotations

from gradwire.agent.messages import Hello
from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.state import Member
from gradwire.errors import BadMessage
from gradwire.ids import WorkerId


def hello(directory: Directory, peer: WorkerId | None = None, losses: int = 0) -> Hello:
    """What this worker says, to a peer if it knows who that is, which it lost so often before."""
    me = directory.myself
    since = 0 if peer is None else directory.since_for(peer)
    return Hello(me.id, me.life, me.address, me.note, since, losses)


def check(theirs: Hello, name: str, directory: Directory, *, dialled: WorkerId | None) -> Member:
    """Who is there, or BadMessage if it is nobody we may speak with."""
    if dialled is not None and theirs.worker != dialled:
        raise BadMessage(f"{name} says that it is not number {dialled}, but {theirs.worker}")
    if dialled is not None and theirs.life != directory.life(dialled):
        raise BadMessage(f"{name} is in another life than the one that was dialled")
    return Member(theirs.worker, name, theirs.address, theirs.life, theirs.note)
