"""What agents say to each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gradwire.ids import WorkerId
from gradwire.wire.message import Message

MOST_CONTENTS = 1 << 16
"""bytes of what an exception holds besides its type, text and traceback"""
BytesUpTo64KiB = Annotated[bytes, msgspec.Meta(max_length=MOST_CONTENTS)]


class Hello(Message, frozen=True, tag=0x01):
    """The first message each way after the handshake, which has said name and job.

    `life` tells a worker from an earlier one of the same number. `address` is where it listens, for
    those who have not heard of it yet; `note` is what they should know besides. `since` is for a
    peer whose number was used before: the count of the sender's first context that is not older
    than this life of the peer. `losses` is how often the sender has lost the peer before.
    """

    worker: WorkerId
    life: int = 0
    address: str = ""
    note: str = ""
    since: int = 0
    losses: int = 0


class Failure(Message, frozen=True, tag=0x02):
    """An exception as data: the answer to a request that failed."""

    type_name: str
    text: str
    hint: str | None
    traceback: str
    worker: str
    peer: str = ""
    """whom it is about, over which link and in which phase; see GradwireError"""
    link: str = ""
    phase: str = ""
    contents: BytesUpTo64KiB = b""
    """what it holds besides: args, attributes, notes, cause, members; as msgpack, see
    exception_contents.py
    """
    note: bytes = b""
    """what the layer above sends along; see Source.note"""


class Done(Message, frozen=True, tag=0x03):
    """The answer to a request that wants to know only that it was heard."""


class Leaving(Message, frozen=True, tag=0x04):
    """A worker on its way out.

    Phase 1: its program is over. Phase 2: nothing of its own is in flight. Phase 3: the others may
    go.
    """

    phase: int


class Ping(Message, frozen=True, tag=0x06):
    """A sign of life on a connection that was silent for a while; who asks wants one back."""

    asks: bool


class Cancel(Message, frozen=True, tag=0x07):
    """Nobody waits for the answer to these requests of mine any more."""

    requests: list[int]


class Left(Message, frozen=True, tag=0x05):
    """A member of an open world takes part no longer, and asks to hear that this was heard."""

    life: int
