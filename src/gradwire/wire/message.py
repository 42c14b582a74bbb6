"""Encoding of messages as msgspec structs, with types and sizes checked on decode.

The msgspec tag of a message class is its kind. The frame's prefix repeats it, so that a reader can
route a frame before decoding it. Kinds are never reused:

    0x01-0x0f  agent      0x20-0x2f  autograd      0x40-0x4f  rpc      0x60-0x6f  optim

The number of values in a message is limited, and counted before decoding: a value of one byte
becomes an object of fifty or more, so a limit on bytes does not limit memory. Every value takes at
least one byte, so data shorter than the limit, which is nearly all, needs no count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Annotated, final

import msgspec

from gradwire.errors import BadMessage, NotSerializable, OverLimit

_LARGEST = sys.float_info.max
Seconds = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
"""A duration sent by a peer. It must be finite: a deadline of NaN or infinity never passes."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base class of all messages; fields are encoded by position, without names."""


def kind_of(message_type: type[Message]) -> int:
    """The kind of a message type."""
    tag = message_type.__struct_config__.tag
    assert isinstance(tag, int), f"{message_type.__name__} has no kind"
    return tag


encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
"""Encode a message as the head of a frame."""


@final
class Kinds:
    """The message types that one worker can decode."""

    def __init__(self, types: Iterable[type[Message]] = (), elements: int = 1 << 20) -> None:
        self._elements = elements
        self._decoders: dict[int, msgspec.msgpack.Decoder[Message]] = {}
        for message_type in types:
            self.add(message_type)

    def add(self, message_type: type[Message]) -> None:
        """Add a message type; its kind must not be in use."""
        kind = kind_of(message_type)
        assert kind not in self._decoders, f"kind {kind:#04x} is taken"
        self._decoders[kind] = msgspec.msgpack.Decoder(message_type)

    def decode(self, kind: int, head: bytes | bytearray | memoryview) -> Message:
        """Decode a message; BadMessage if a correct peer would not have sent it."""
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
    """The encoded length of a msgpack value by its first byte; 0 if a length field follows."""
    steps = [1] * 256  # small integers, None, bool, and the headers of small containers
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


# bin, ext, str of 8, 16 and 32 bits: width of the length field, and of the ext type after it.
_LENGTHS = {
    **{0xC4 + n: (1 << n, 0) for n in range(3)},
    **{0xC7 + n: (1 << n, 1) for n in range(3)},
    **{0xD9 + n: (1 << n, 0) for n in range(3)},
}
_STEPS = _steps()


def has_more_than(data: _Data, most: int) -> bool:
    """Whether there are more than `most` msgpack values; containers and their items count alike.

    The result for invalid msgpack is arbitrary: the decoder refuses it.
    """
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
    """Raise OverLimit if a peer sent more than `most` values."""
    if len(data) > most and has_more_than(data, most):
        raise OverLimit(
            f"a message holds more than {most} values",
            hint="send a tensor or an array instead, or raise Limits(elements=…) here",
        )


def check_leaving(data: _Data, most: int) -> None:
    """Raise NotSerializable if a peer with the same limits would refuse the data."""
    if len(data) > most and has_more_than(data, most):
        raise NotSerializable(
            f"more than {most} numbers, texts and containers do not travel in one message",
            hint="send them as a tensor or a numpy array, or raise Limits(elements=…) on both ends",
        )
