"""The layout of one message: a fixed prefix, a head (msgpack) and a payload (raw tensor bytes).

    prefix   32 bytes, little endian:
             kind u16, flags u16, head length u32, payload length u64, request u64,
             checksum of the content u32, checksum of the prefix up to here u32
    head     the message, encoded by wire/message.py
    payload  tensor bytes, each tensor aligned to 64; absent when the length is 0

`request` matches an answer to its request; 0 means that no answer is expected. Bit 0 of `flags`
marks an answer. Bits 8 and 9 are used by unix channels (transport/shared_memory.py): the sender of
bit 8 can read payloads from shared memory, and bit 9 says that this payload lies there. The other
bits must be 0.

Checksums are CRC-32. The content checksum covers the head and, if bit 1 of `flags` is set, also the
payload. They detect bytes corrupted between the workers before any length or number is trusted;
TCP's checksum does not cover a faulty proxy. They are no protection against an attacker.
This file knows lengths and limits, not what a message means.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from zlib import crc32

import msgspec

from gradwire.errors import BadMessage, OverLimit
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

NOT_BYTES = "a payload part is not a view of single bytes"
_SUMS = "something between the workers corrupts bytes, or the sender is not a gradwire worker"


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A message as a channel carries it.

    In an outgoing frame, `payload` is a list of buffers sent one after the other; they must not
    change until `Channel.send` returns. In an incoming frame it holds at most one buffer with all
    payload bytes, which stays alive until the last tensor in it dies.
    """

    kind: int
    flags: int
    request: int
    head: bytes
    payload: Sequence[Buffer]


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
    """Encode the whole frame into one buffer if it is small, with at most `most` bytes of payload.

    hot: every small message
    """
    head, payload = frame.head, frame.payload
    flags |= frame.flags
    length = 0
    for part in payload:
        length += len(part)
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
    assert len(whole) == PREFIX.size + len(head) + length, NOT_BYTES
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
        raise OverLimit(f"a message head of {head} bytes is over the limit of {limits.head}")
    if payload > limits.payload:
        raise OverLimit(f"a payload of {payload} bytes is over the limit of {limits.payload}")
    return prefix
