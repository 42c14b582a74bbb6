"""Messages between agents."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gradwire.ids import WorkerId
from gradwire.transport.devices.words import PageAddress
from gradwire.wire.message import Message

MOST_CONTENTS = 1 << 16
"""bytes of the contents of an exception: all but its type, text and traceback"""
BytesUpTo64KiB = Annotated[bytes, msgspec.Meta(max_length=MOST_CONTENTS)]


class Hello(Message, frozen=True, tag=0x01):
    """The first message each way after the handshake, which has exchanged names and job.

    `incarnation` differs from that of an earlier worker with the same number.
    `address` is where the sender listens, and `note` its note, for a peer that does not know them
    yet. `since` is for a peer whose number was used before: the count of the sender's first context
    that is not older than this incarnation of the peer. `losses` is how often the sender has lost
    the peer before.
    """

    worker: WorkerId
    incarnation: int = 0
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
    """the peer, the link and the phase that it is about; see GradwireError"""
    link: str = ""
    phase: str = ""
    contents: BytesUpTo64KiB = b""
    """args, attributes, notes, cause and members; as msgpack, see exception_contents.py"""
    note: bytes = b""
    """added by the layer above; see Source.note"""


class Done(Message, frozen=True, tag=0x03):
    """The answer to a request that needs an acknowledgement only."""


class Leaving(Message, frozen=True, tag=0x04):
    """A step of a worker's graceful shutdown.

    Phase 1: its program is over. Phase 2: it has nothing in flight. Phase 3: the others may close.
    """

    phase: int


class Ping(Message, frozen=True, tag=0x06):
    """A heartbeat on a connection that was silent for a while; `asks` requests one in return."""

    asks: bool


class Cancel(Message, frozen=True, tag=0x07):
    """The sender does not wait for the answers to these of its requests any more."""

    requests: list[int]


class Left(Message, frozen=True, tag=0x05):
    """The sender has left an open world; answered with Done."""

    incarnation: int


class OpenBlock(Message, frozen=True, tag=0x08):
    """Map this block of device memory; answered with BlockOpened. See agent/devices/links.py."""

    number: int
    """its number in tensor headers: never used again by the sender"""
    index: int
    """of its byte in the page"""
    kind: str
    """of the device: the type of its torch.device"""
    uuid: str
    room: int
    handle: bytes
    """by which the driver of that kind opens it"""
    page: PageAddress


class BlockOpened(Message, frozen=True, tag=0x09):
    """A block is mapped, or cannot be: then `refusal` says why."""

    proof: bytes
    """what was read at the beginning of the block"""
    process: int
    refusal: str = ""
