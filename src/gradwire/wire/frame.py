"""One message on its way: a fixed prefix, a head (msgpack) and a payload (raw tensor bytes).

    prefix   24 bytes, little endian:
             kind u16, flags u16, head length u32, payload length u64, request u64
    head     the message, encoded by wire/message.py
    payload  tensor bytes, each tensor aligned to 64; absent when the length is 0

`request` ties an answer to what it answers; 0 means that no answer is wanted. Bit 0 of `flags`
marks an answer. Bits 8 and 9 are a unix channel's own (transport/shared.py): whoever sets 8 can
read payloads from shared memory, and 9 says that this one lies there. The other bits are reserved
for the checksum and must be 0.
This file knows lengths and limits, not what a message means.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.errors import BadMessage
from gradwire.options import Limits

PREFIX = struct.Struct("<HHIQQ")
ALIGNMENT = 64
IS_ANSWER = 1
TAKES_BLOCKS = 1 << 8
IN_BLOCK = 1 << 9

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """A message as a channel carries it.

    Outgoing, `payload` is a list of buffers sent one after the other; they must stay unchanged
    until `Channel.send` returns. Incoming, it holds at most one buffer: all payload bytes in one
    block, which the receiver owns until the last tensor on it dies.
    """

    kind: int
    flags: int
    request: int
    head: bytes
    payload: Sequence[Buffer]


class Prefix(NamedTuple):
    """The decoded first bytes of a frame."""

    kind: int
    flags: int
    head_length: int
    payload_length: int
    request: int


def encode_prefix(frame: Frame, flags: int = 0) -> bytes:
    """The bytes that go before head and payload; `flags` are the channel's own."""
    kind, own_flags, request, head, payload = frame
    length = sum(map(len, payload)) if payload else 0
    return PREFIX.pack(kind, own_flags | flags, len(head), length, request)


def decode_prefix(
    data: Buffer, limits: Limits, known_flags: int = IS_ANSWER, start: int = 0
) -> Prefix:
    """The prefix at `start` of `data`, refused if it promises more than allowed."""
    prefix = Prefix._make(PREFIX.unpack_from(data, start))
    _, flags, head, payload, _ = prefix
    if flags & ~known_flags:
        raise BadMessage(f"a frame has unknown flags {flags & ~known_flags:#06x}")
    if head > limits.head:
        raise BadMessage(f"a message head of {head} bytes is over the limit of {limits.head}")
    if payload > limits.payload:
        raise BadMessage(f"a payload of {payload} bytes is over the limit of {limits.payload}")
    return prefix
