"""A bit that changes on the way is found, wherever it is."""

from __future__ import annotations

import socket
import time

import pytest
from msgspec.structs import replace

from gradwire.errors import BadMessage, PeerLost
from gradwire.options import Limits
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import SharedMemory
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.wire.message import (
    PREFIX,
    SUMS_PAYLOAD,
    Frame,
    Prefix,
    check_content,
    decode_prefix,
    encode_prefix,
    pack_prefix,
)
from tests.transport.conformance import recv

FRAME = Frame(0x40, 1, 7, b"the head", [b"some", b"payload"])
BYTES = encode_prefix(FRAME, SUMS_PAYLOAD) + b"the head" + b"somepayload"
KNOWN = SUMS_PAYLOAD | 1


def channel_of(sock: socket.socket, **options) -> SocketChannel:
    made = {"limits": Limits(), "stall": 5.0, "pool": BlockPool(), **options}
    return SocketChannel(sock, "unix:///peer", **made)


@pytest.mark.parametrize("place", range(len(BYTES)))
@pytest.mark.parametrize("bit", [0, 7])
def test_no_bit_of_a_frame_changes_unseen(place, bit):
    changed = bytearray(BYTES)
    changed[place] ^= 1 << bit
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(changed)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(BadMessage, match=r"has a wrong checksum") as refused:
            recv(channel_of(ours))
    assert "something between the workers corrupts bytes" in str(refused.value)


def test_a_length_is_not_believed_before_its_sum_is_right():
    lied = bytearray(BYTES)
    lied[4:8] = (1 << 20).to_bytes(4, "little")
    with pytest.raises(BadMessage, match="the prefix of a frame has a wrong checksum"):
        decode_prefix(lied, Limits(), KNOWN)


def test_the_payload_has_a_sum_only_if_that_was_asked_for():
    plain = encode_prefix(FRAME)
    prefix = decode_prefix(plain, Limits(), KNOWN)
    check_content(prefix, FRAME.head, [b"something else"])
    with pytest.raises(BadMessage, match="a message of kind 0x0040 has a wrong checksum"):
        check_content(prefix, b"the hEad", FRAME.payload)
    summed = decode_prefix(BYTES, Limits(), KNOWN)
    check_content(summed, FRAME.head, [b"somepayload"])
    with pytest.raises(BadMessage, match="has a wrong checksum"):
        check_content(summed, FRAME.head, [b"something else"])


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("sharing", [False, True])
def test_channels_sum_what_they_are_told_to(checksum, sharing):
    ours, theirs = socket.socketpair()
    shared = (lambda: SharedMemory(smallest=1)) if sharing else (lambda: None)
    here = channel_of(ours, checksum=checksum, shared=shared())
    there = channel_of(theirs, checksum=checksum, shared=shared())
    try:
        for sender, receiver in [(here, there), (there, here)] * 2:
            sender.send(FRAME, time.monotonic() + 5)
            came = recv(receiver)
            assert replace(came, payload=()) == replace(FRAME, payload=())
            assert bytes(came.payload[0]) == b"somepayload"
    finally:
        here.close()
        there.close()
    with pytest.raises(PeerLost):
        recv(here)


def test_a_prefix_is_what_its_numbers_say():
    packed = pack_prefix(1, 0, 2, 3, 4)
    assert len(packed) == PREFIX.size
    assert replace(decode_prefix(packed, Limits()), prefix_sum=0) == Prefix(1, 0, 2, 3, 4, 0, 0)
