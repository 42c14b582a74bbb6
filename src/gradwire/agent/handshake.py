"""The first message each way on a new connection, before anything else of it is read.

Pure: what to say, and whether to believe what was said. The place of authentication: `proof` is
made and checked here, and nowhere else.
"""

from __future__ import annotations

from gradwire.agent.directory import Directory
from gradwire.agent.messages import PROTOCOL, Hello
from gradwire.errors import BadMessage
from gradwire.ids import WorkerId


def hello(directory: Directory, job: str, to: str) -> Hello:
    """What this worker says first."""
    return Hello(PROTOCOL, job, directory.me.id, directory.me.name, to)


def check(theirs: Hello, directory: Directory, job: str, *, dialled: WorkerId | None) -> WorkerId:
    """Who is there, or BadMessage if it is nobody we may speak with."""
    if theirs.protocol != PROTOCOL:
        raise BadMessage(f"{theirs.name} speaks protocol {theirs.protocol}, this worker {PROTOCOL}")
    if theirs.job != job:
        raise BadMessage(f"{theirs.name} belongs to another job")
    if theirs.to != directory.me.name:
        raise BadMessage(f"{theirs.name} looked for {theirs.to} and found {directory.me.name}")
    if dialled is not None and theirs.worker != dialled:
        raise BadMessage(f"{theirs.name} answered at the address of {directory.name(dialled)}")
    if directory.name(theirs.worker) != theirs.name:
        raise BadMessage(f"{theirs.name} claims the number of {directory.name(theirs.worker)}")
    return theirs.worker
