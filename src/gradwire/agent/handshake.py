"""The first message each way on a new connection, before anything else of it is read.

Pure: what to say, and whether to believe what was said. The place of authentication: `proof` is
made and checked here, and nowhere else.
"""

from __future__ import annotations

from gradwire.agent.directory import Directory
from gradwire.agent.members_state import Member
from gradwire.agent.messages import PROTOCOL, Hello
from gradwire.errors import BadMessage
from gradwire.ids import WorkerId


def hello(directory: Directory, job: str, to: str) -> Hello:
    """What this worker says first."""
    me = directory.myself
    return Hello(PROTOCOL, job, me.id, me.name, to, me.life, me.address, me.note)


def check(theirs: Hello, directory: Directory, job: str, *, dialled: WorkerId | None) -> Member:
    """Who is there, or BadMessage if it is nobody we may speak with."""
    if theirs.protocol != PROTOCOL:
        raise BadMessage(f"{theirs.name} speaks protocol {theirs.protocol}, this worker {PROTOCOL}")
    if theirs.job != job:
        raise BadMessage(f"{theirs.name} belongs to another job")
    if theirs.to != directory.me.name:
        raise BadMessage(f"{theirs.name} looked for {theirs.to} and found {directory.me.name}")
    if dialled is not None and theirs.worker != dialled:
        raise BadMessage(f"{theirs.name} answered at the address of {directory.name(dialled)}")
    if dialled is not None and theirs.life != directory.life(dialled):
        raise BadMessage(f"{theirs.name} is in another life than the one that was dialled")
    return Member(theirs.worker, theirs.name, theirs.address, theirs.life, theirs.note)
