"""Messages to bytes and back: msgspec structs, typed, checked on decode.

A message class carries its kind as its msgspec tag; the same number stands in the frame's prefix,
so that a reader can route a frame before decoding it. Kinds are never reused:

    0x01-0x0f  agent      0x20-0x2f  autograd      0x40-0x4f  rpc      0x60-0x6f  optim

This file knows nothing of what the messages mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Annotated, final

import msgspec

from gradwire.errors import BadMessage
from gradwire.wire.elements import check_arrived

_LARGEST = sys.float_info.max
Seconds = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
"""A duration that a peer tells: a number, and finite. A deadline that is none would never pass."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base of everything that crosses: fields by position, no names on the wire."""


def kind_of(message_type: type[Message]) -> int:
    """The number a message type travels under."""
    tag = message_type.__struct_config__.tag
    assert isinstance(tag, int), f"{message_type.__name__} has no kind"
    return tag


encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
"""The head of a frame."""


@final
class Kinds:
    """The messages one worker understands."""

    def __init__(self, types: Iterable[type[Message]] = (), elements: int = 1 << 20) -> None:
        self._elements = elements
        self._decoders: dict[int, msgspec.msgpack.Decoder[Message]] = {}
        self.types: list[type[Message]] = []
        for message_type in types:
            self.add(message_type)

    def add(self, message_type: type[Message]) -> None:
        """Understand one more; two types under one kind are a mistake of ours."""
        kind = kind_of(message_type)
        assert kind not in self._decoders, f"kind {kind:#04x} is taken"
        self._decoders[kind] = msgspec.msgpack.Decoder(message_type)
        self.types.append(message_type)

    def decode(self, kind: int, head: bytes | bytearray | memoryview) -> Message:
        """The message, or BadMessage if no correct peer would have sent this."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise BadMessage(f"a message of unknown kind {kind:#06x}")
        if len(head) > self._elements:
            check_arrived(head, self._elements)
        try:
            return decoder.decode(head)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadMessage(f"a message of kind {kind:#04x} does not decode: {error}") from None
