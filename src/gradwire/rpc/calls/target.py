"""What a call is to run, how people speak of it, and what stands for it while it runs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from gradwire.agent.agent import Outcome
from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.promise import Promise
from gradwire.ids import CallId, WorkerId
from gradwire.rpc.recompute.checkpoint_run import CheckpointedCall
from gradwire.rpc.refs.handles_state import RefHandle


class Target(msgspec.Struct, frozen=True):
    """What to run and its arguments. See Note [How a call names its function], rpc/messages.py."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    what: str = ""
    """how errors and warnings call it, where its own name says little"""


@lru_cache(1 << 10)
def spoken(name: str) -> str:
    """The name of a function of ours in errors and warnings."""
    return name.replace(":", ".").lstrip(".!")


def spoken_on(directory: Directory, to: WorkerId, name: str) -> str:
    """The name of a function, and of the worker that runs it."""
    return f"{spoken(name)} on {directory.name(to)}"


class Sent(msgspec.Struct, frozen=True):
    """A call on its way, and how much of the window it takes."""

    call: CallId
    promise: Promise[Outcome]
    size: int
    asked: CheckpointedCall | None
    """if it is made for a checkpoint"""


class Created(NamedTuple):
    """A reference to a value that is being made, and the answer to the call that makes it."""

    handle: RefHandle
    answer: Promise[Outcome]
