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

from gradwire.errors import BadMessage, NotSerializable, OverLimit

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


_Data = bytes | bytearray | memoryview


def _steps() -> list[int]:
    """How many bytes each first byte stands for; 0 where a length follows it."""
    steps = [1] * 256  # small numbers, None, bool, and the heads of small containers
    for length in range(32):
        steps[0xA0 + length] = 1 + length
    for first, step in ((0xCA, 5), (0xCB, 9), (0xDC, 3), (0xDD, 5), (0xDE, 3), (0xDF, 5)):
        steps[first] = step
    for power in range(4):
        steps[0xCC + power] = steps[0xD0 + power] = 1 + (1 << power)
    for power in range(5):
        steps[0xD4 + power] = 2 + (1 << power)
    for first in _LENGTHS:
        steps[first] = 0
    return steps


# bin, ext, str of 8, 16 and 32 bits: how wide the length is, and what stands beside it.
_LENGTHS = {
    **{0xC4 + n: (1 << n, 0) for n in range(3)},
    **{0xC7 + n: (1 << n, 1) for n in range(3)},
    **{0xD9 + n: (1 << n, 0) for n in range(3)},
}
_STEPS = _steps()


def has_more_than(data: _Data, most: int) -> bool:
    """Whether there are more values than that, containers and what is in them counted alike."""
    place = count = 0
    while place < len(data):
        count += 1
        if count > most:
            return True
        first = data[place]
        step = _STEPS[first]
        if not step:
            width, beside = _LENGTHS[first]
            length = int.from_bytes(data[place + 1 : place + 1 + width], "big")
            step = 1 + width + beside + length
        place += step
    return False


def check_arrived(data: _Data, most: int) -> None:
    """OverLimit if a peer sent more values than that."""
    if len(data) > most and has_more_than(data, most):
        raise OverLimit(
            f"a message holds more than {most} values",
            hint="its sender should send tensors or arrays; or raise Limits(elements=…) here",
        )


def check_leaving(data: _Data, most: int) -> None:
    """NotSerializable if a peer with the same limits would refuse so many."""
    if len(data) > most and has_more_than(data, most):
        raise NotSerializable(
            f"more than {most} numbers, texts and containers do not travel in one message",
            hint="send them as a tensor or a numpy array, or raise Limits(elements=…) on both ends",
        )
