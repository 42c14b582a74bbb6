"""One message on the wire: a fixed prefix, a head (msgpack) and a payload (raw tensor bytes).

    prefix   32 bytes, little endian:
             kind u16, flags u16, head length u32, payload length u64, request u64,
             checksum of the content u32, checksum of the prefix up to here u32
    head     the message: a msgspec struct, its types and sizes checked when it is decoded
    payload  tensor bytes, each tensor aligned to 64; absent when the length is 0

`request` matches an answer to its request; 0 means that no answer is expected. Bit 0 of `flags`
marks an answer. Bits 8 and 9 are used by unix channels (transport/shared_memory.py): the sender of
bit 8 can read payloads from shared memory, and bit 9 says that this payload lies there. The other
bits must be 0.

Checksums are CRC-32. The content checksum covers the head and, if bit 1 of `flags` is set, also the
payload. They detect bytes corrupted between the workers before any length or number is trusted;
TCP's checksum does not cover a faulty proxy. They are no protection against an attacker.

The msgspec tag of a message class is its kind. The prefix repeats it, so that a frame can be routed
before its head is decoded. Kinds are never reused:

    0x01-0x0f  agent      0x20-0x2f  autograd      0x40-0x4f  rpc
    0x60-0x6f  optim      0x70-0x7f  seeing

The number of values in a head is limited, and counted before decoding: a value of one byte becomes
an object of fifty or more, so a limit on bytes does not limit memory. Every value takes at least
one byte, so data shorter than the limit, which is nearly all, needs no count.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, final
from zlib import crc32

import msgspec
from msgspec.structs import astuple

from gradwire.errors import BadMessage, NotSerializable, OverLimit
from gradwire.options import Limits

PREFIX = struct.Struct("<HHIQQII")
_BEFORE_SUM = struct.Struct("<HHIQQI")
_SUM = struct.Struct("<I")
SMALL = 1 << 12
"""Frames with at most this many bytes of head and of payload are joined into one buffer to send."""
ALIGNMENT = 64
IS_ANSWER = 1
SUMS_PAYLOAD = 1 << 1
TAKES_BLOCKS = 1 << 8
IN_BLOCK = 1 << 9

Buffer = bytes | bytearray | memoryview

_SUMS = "something between the workers corrupts bytes, or the sender is not a gradwire worker"


class Frame(msgspec.Struct, gc=False, eq=False):
    """A message as a channel carries it.

    The buffers in the payload of an outgoing frame must not change until `Channel.send` returns.
    That of an incoming one holds at most one, which lives until the last tensor in it dies.
    """

    kind: int
    flags: int
    request: int
    head: bytes
    payload: Sequence[Buffer]
    has_left: bool = False
    """set by `Channel.send` in one step with sending it: then it arrives, or the channel ends"""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and astuple(self)[:5] == astuple(other)[:5]

    __hash__ = None  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """Its bytes, without the prefix."""
        return len(self.head) + sum(map(len, self.payload))


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The decoded first bytes of a frame."""

    kind: int
    flags: int
    head_length: int
    payload_length: int
    request: int
    content_sum: int
    prefix_sum: int


def encode_prefix(frame: Frame, flags: int = 0) -> bytes:
    """Encode the prefix of a frame; `flags` are added by the channel."""
    head, payload = frame.head, frame.payload
    flags |= frame.flags
    length = sum(map(len, payload)) if payload else 0
    content = crc32(head)
    if flags & SUMS_PAYLOAD:
        for part in payload:
            content = crc32(part, content)
    return pack_prefix(frame.kind, flags, len(head), length, frame.request, content)


def maybe_small(frame: Frame, flags: int = 0, most: int = SMALL) -> bytes | None:
    """Encode the whole frame into one buffer if its payload has at most `most` bytes.

    hot: every small message
    """
    head, payload = frame.head, frame.payload
    flags |= frame.flags
    length = sum(map(len, payload)) if payload else 0
    if length > most or len(head) > SMALL:
        return None
    content = crc32(head)
    if flags & SUMS_PAYLOAD:
        for part in payload:
            content = crc32(part, content)
    prefix = _BEFORE_SUM.pack(frame.kind, flags, len(head), length, frame.request, content)
    if not payload:
        return prefix + _SUM.pack(crc32(prefix)) + head
    whole = b"".join((prefix, _SUM.pack(crc32(prefix)), head, *payload))
    size = PREFIX.size + len(head) + length
    assert len(whole) == size, "a payload part is not a view of single bytes"
    return whole


def pack_prefix(
    kind: int, flags: int, head: int, payload: int, request: int, content: int = 0
) -> bytes:
    """Encode a prefix from its fields, and append its checksum. The CRC of no content is 0."""
    prefix = _BEFORE_SUM.pack(kind, flags, head, payload, request, content)
    return prefix + _SUM.pack(crc32(prefix))


def check_content(prefix: Prefix, head: Buffer, payload: Sequence[Buffer]) -> None:
    """Raise BadMessage if the content checksum does not match."""
    content = crc32(head)
    if prefix.flags & SUMS_PAYLOAD:
        for part in payload:
            content = crc32(part, content)
    if content != prefix.content_sum:
        raise BadMessage(f"a message of kind {prefix.kind:#06x} has a wrong checksum", hint=_SUMS)


def decode_prefix(
    data: Buffer, limits: Limits, known_flags: int = IS_ANSWER, start: int = 0
) -> Prefix:
    """Decode the prefix at `start` of `data`; raises if a length is over the limits."""
    prefix = Prefix(*PREFIX.unpack_from(data, start))
    flags, head, payload = prefix.flags, prefix.head_length, prefix.payload_length
    if crc32(data[start : start + _BEFORE_SUM.size]) != prefix.prefix_sum:
        raise BadMessage("the prefix of a frame has a wrong checksum", hint=_SUMS)
    if flags & ~known_flags:
        raise BadMessage(f"a frame has unknown flags {flags & ~known_flags:#06x}")
    if head > limits.head:
        why = f"a message head of {head} bytes is over the limit of {limits.head}"
        raise OverLimit(why, hint=raise_limit("head"))
    if payload > limits.payload:
        why = f"a payload of {payload} bytes is over the limit of {limits.payload}"
        raise OverLimit(why, hint=raise_limit("payload"))
    return prefix


_LARGEST = sys.float_info.max
Seconds = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
"""A duration sent by a peer. It must be finite: a deadline of NaN or infinity never passes."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The base class of all messages; fields are encoded by position, without names."""

    @property
    def carried(self) -> Sequence[object]:
        """The headers of its tensors, if it has a body with some."""
        return getattr(getattr(self, "body", None), "tensors", ())


def kind_of(message_type: type[Message]) -> int:
    """The kind of a message type."""
    tag = message_type.__struct_config__.tag
    assert isinstance(tag, int), f"{message_type.__name__} has no kind"
    return tag


encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
"""Encode a message as the head of a frame."""


def make_frame(
    message: Message, payload: Sequence[Buffer], limits: Limits, request: int = 0, flags: int = 0
) -> Frame:
    """The frame of a message; NotSerializable over the limits, where a peer would hang up."""
    head = encode(message)
    if len(head) > limits.head or (payload and sum(map(len, payload)) > limits.payload):
        body = sum(map(len, payload))
        raise NotSerializable(
            f"a {type(message).__name__} of {len(head)} bytes and {body} bytes of tensors is "
            f"over the limits of {limits.head} and {limits.payload}",
            hint="send it in parts, or raise Options(limits=Limits(…)) on both workers",
        )
    # The tag is the kind, as `kind_of` says.
    return Frame(type(message).__struct_config__.tag, flags, request, head, payload)  # type: ignore[arg-type]


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

    def decode(self, kind: int, head: Buffer) -> Message:
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


# The encoded length of a msgpack value by its first byte; 0 if a length field follows.
_STEPS = (
    *([1] * 0xA0),  # small integers, and the headers of small maps and arrays
    *range(1, 33),  # short texts
    *(1, 1, 1, 1, 0, 0, 0, 0, 0, 0),  # None, (unused), False, True; bin and ext
    *(5, 9, 2, 3, 5, 9, 2, 3, 5, 9),  # floats and integers
    *(3, 4, 6, 10, 18, 0, 0, 0),  # ext of a fixed length; str
    *(3, 5, 3, 5),  # the headers of arrays and maps
    *([1] * 0x20),  # small negative integers
)
# bin, ext, str of 8, 16 and 32 bits: width of the length field, and of the ext type after it.
_LENGTHS = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_LENGTHS |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}


def has_more_than(data: Buffer, most: int) -> bool:
    """Whether there are more than `most` msgpack values; containers and their items count alike.

    The result for invalid msgpack is arbitrary: the decoder refuses it.
    """
    place = count = 0
    while place < len(data):
        count += 1
        if count > most:
            return True
        step = _STEPS[data[place]]
        if not step:
            width, beside = _LENGTHS[data[place]]
            length = int.from_bytes(data[place + 1 : place + 1 + width], "big")
            step = 1 + width + beside + length
        place += step
    return False


def raise_limit(name: str) -> str:
    """The hint of an error about what a peer sent."""
    return f"send less at once, or raise Limits({name}=…) where it was refused"


def check_arrived(data: Buffer, most: int) -> None:
    """Raise OverLimit if a peer sent more than `most` values."""
    if len(data) > most and has_more_than(data, most):
        raise OverLimit(
            f"a message holds more than {most} values",
            hint="send a tensor or an array instead, or raise Limits(elements=…) here",
        )


def check_leaving(data: Buffer, most: int) -> None:
    """Raise NotSerializable if a peer with the same limits would refuse the data."""
    if len(data) > most and has_more_than(data, most):
        raise NotSerializable(
            f"more than {most} numbers, texts and containers do not fit in one message",
            hint="send them as a tensor or a numpy array, or raise Limits(elements=…) on both ends",
        )
