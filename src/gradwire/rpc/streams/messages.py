"""The messages of streams."""

from __future__ import annotations

from typing import Annotated

import msgspec

from gradwire.ids import RefId
from gradwire.rpc.messages import Body
from gradwire.wire.message import Message, Seconds

Count = Annotated[int, msgspec.Meta(ge=0)]


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One item of a stream.

    The bytes of its tensors are the next `size` bytes of the payload, which are followed by zeros
    up to a multiple of the alignment. `copies` as in Result.
    """

    body: Body
    size: Count
    copies: int = 0


class AskItems(Message, frozen=True, tag=0x50):
    """Send me what is ready of this stream, at least one item. Answered by Items.

    The sender has read so many items. The generator may be so far ahead of that as was said when
    the stream was opened.
    """

    ref: RefId
    read: Count
    seconds: Seconds


class Items(Message, frozen=True, tag=0x51):
    """The next items of a stream, in order; `is_last` if there are no more."""

    items: list[Item]
    is_last: bool


class EndStream(Message, frozen=True, tag=0x52):
    """End the generator of this stream where it is. Answered by Done when it has ended."""

    ref: RefId
    seconds: Seconds
