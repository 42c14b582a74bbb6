"""Payloads in shared memory: where they lie, when a block goes home, what a peer can lie about."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import resource
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator

import pytest
import torch

from gradwire.errors import BadMessage, DeadlinePassed, PeerLost
from gradwire.options import Limits
from gradwire.transport.base import MAX_BUFFERED_BYTES
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import (
    FREE,
    MOST_BLOCKS,
    NOTE,
    SharedMemory,
    can_share,
    make_block,
)
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.unix import UnixTransport
from gradwire.wire.message import IN_BLOCK, TAKES_BLOCKS, Frame
from gradwire.wire.message import pack_prefix as prefix_of
from gradwire.wire.tensor import decode_tensors, encode_tensors
from tests.transport.conformance import recv

pytestmark = pytest.mark.skipif(not can_share(), reason="this system has no memfd")

LARGE = 1 << 20
Pair = tuple[SocketChannel, SocketChannel]


def soon() -> float:
    return time.monotonic() + 5


def as_channel(sock: socket.socket, shared: SharedMemory | None) -> SocketChannel:
    return SocketChannel(
        sock, "unix:///peer", limits=Limits(), stall=5.0, pool=BlockPool(), shared=shared
    )


def greet(here: SocketChannel, there: SocketChannel) -> None:
    for near, far in ((here, there), (there, here)):
        near.send(Frame(0, 0, 0, b"hello", ()), soon())
        recv(far)


@pytest.fixture
def shared() -> SharedMemory:
    """What `here` has: the maker of the blocks that these tests look at."""
    return SharedMemory()


@pytest.fixture
def pair(shared: SharedMemory) -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    here, there = as_channel(ours, shared), as_channel(theirs, SharedMemory())
    greet(here, there)
    yield here, there
    here.close()
    there.close()


def frame_of(byte: int, size: int = LARGE) -> Frame:
    return Frame(1, 0, byte, b"head", [bytes([byte]) * size])


def carried(pair: Pair, frame: Frame) -> memoryview:
    here, there = pair
    here.send(frame, soon())
    (payload,) = recv(there).payload
    assert isinstance(payload, memoryview)
    assert bytes(payload) == b"".join(frame.payload)
    return payload


def mapped() -> int:
    """How many blocks this process has mapped; both ends of a pair count."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:gradwire" in line for line in maps)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_shared(view: memoryview) -> bool:
    start = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if low <= start < high:
                return "memfd:gradwire" in line
    raise AssertionError("the payload lies nowhere")


# --- where payloads go ---


def test_a_large_payload_lies_in_shared_memory_and_a_small_one_does_not(pair):
    assert is_shared(carried(pair, frame_of(1)))
    assert not is_shared(carried(pair, frame_of(1, 1000)))


def test_a_payload_in_a_block_may_follow_a_large_head(pair):
    here, there = pair
    frames = [
        Frame(1, 0, n, bytes([n]) * size, [bytes([n]) * LARGE])
        for n, size in enumerate((65496, 65497, 300_000, 10, 300_000))
    ]
    sending = threading.Thread(target=lambda: [here.send(frame, soon()) for frame in frames])
    sending.start()
    for frame in frames:
        received = recv(there)
        assert (received.head, bytes(received.payload[0])) == (frame.head, frame.payload[0])
        assert is_shared(received.payload[0])  # type: ignore[arg-type]
    sending.join()


def test_a_payload_in_a_block_is_aligned_and_writable_and_of_its_own_length(pair):
    payload = carried(pair, frame_of(1, LARGE + 1))
    assert (len(payload), payload.format, payload.readonly) == (LARGE + 1, "B", False)
    assert torch.frombuffer(payload, dtype=torch.uint8).data_ptr() % 64 == 0
    payload[:3] = b"xyz"


def test_nothing_goes_into_a_block_before_the_peer_has_said_that_it_can_read_it():
    ours, theirs = socket.socketpair()
    here, there = as_channel(ours, SharedMemory()), as_channel(theirs, None)
    sending = threading.Thread(target=lambda: [here.send(frame_of(1), soon()) for _ in range(2)])
    sending.start()
    assert not is_shared(recv(there).payload[0])  # type: ignore[arg-type]
    there.send(Frame(0, 0, 0, b"", ()), soon())
    recv(here)
    assert not is_shared(recv(there).payload[0])  # type: ignore[arg-type]
    sending.join()
    here.close()
    there.close()


@pytest.mark.parametrize("sides", [(0, 1 << 30), (1 << 30, 0)])
def test_ends_of_which_one_has_no_shared_memory_understand_each_other(sides):
    gc.collect()  # blocks of earlier tests that only cycles hold
    listening, dialling = (UnixTransport(shared_bytes=n) for n in sides)
    listener = listening.listen("unix://")
    here = dialling.connect(listener.address, soon())
    there = listener.accept()
    greet(here, there)
    for near, far in ((here, there), (there, here)):
        sending = threading.Thread(target=near.send, args=(frame_of(7), soon()))
        sending.start()
        (payload,) = recv(far).payload
        sending.join()
        assert bytes(payload) == bytes([7]) * LARGE
    assert mapped() == 0
    for each in (here, there, listener):
        each.close()


# --- when a block goes home ---


def test_a_block_is_used_again_only_after_the_last_tensor_on_it_died(pair, shared):
    headers, buffers = encode_tensors([torch.full((LARGE,), float(n)) for n in range(3)])
    tensors = decode_tensors(headers, carried(pair, Frame(1, 0, 0, b"", buffers)))
    one_block = shared.lent_bytes
    kept = tensors[1]
    del tensors
    other = carried(pair, Frame(1, 0, 0, b"", buffers))
    assert shared.lent_bytes == 2 * one_block
    assert bool((kept == 1).all())
    del kept, other
    for _ in range(5):
        carried(pair, Frame(1, 0, 0, b"", buffers))
    assert shared.lent_bytes == 2 * one_block


def test_a_view_sliced_from_a_payload_keeps_its_block(pair):
    payload = carried(pair, frame_of(1))
    sliced = payload[10:20]
    del payload
    for byte in range(2, 5):
        carried(pair, frame_of(byte))
    assert bytes(sliced) == bytes([1]) * 10


def test_a_payload_in_a_garbage_cycle_goes_home(pair, shared):
    cycle: list[object] = [carried(pair, frame_of(1))]
    cycle.append(cycle)
    once = shared.lent_bytes
    del cycle
    gc.collect()
    carried(pair, frame_of(2))
    assert shared.lent_bytes == once


def test_what_the_receiver_writes_is_its_own(pair):
    sent = bytearray(LARGE)
    kept = carried(pair, Frame(1, 0, 0, b"", [sent]))
    kept[:] = b"x" * LARGE
    carried(pair, Frame(1, 0, 0, b"", [sent]))
    assert bytes(kept) == b"x" * LARGE
    assert sent == bytes(LARGE)


def test_a_forked_child_returns_no_block_of_its_parent(pair, shared):
    kept = carried(pair, frame_of(1))
    once = shared.lent_bytes
    child = os.fork()
    if child == 0:
        del kept
        os._exit(0)
    os.waitpid(child, 0)
    carried(pair, frame_of(2))
    assert bytes(kept) == bytes([1]) * LARGE
    assert shared.lent_bytes == 2 * once


def test_many_threads_share_a_channel(pair):
    here, there = pair
    sizes = [200_000, 300_001, 1 << 20, 1000]

    def sends(mark: int) -> None:
        for number in range(12):
            here.send(frame_of(mark, sizes[(mark + number) % 4]), soon())

    threads = [threading.Thread(target=sends, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    kept = []
    for _ in range(48):
        frame = recv(there)
        if frame.request % 2:
            kept.append(frame)
        assert bytes(frame.payload[0]) == bytes([frame.request]) * len(frame.payload[0])
        del frame
    for thread in threads:
        thread.join()
    for frame in kept:
        assert bytes(frame.payload[0]) == bytes([frame.request]) * len(frame.payload[0])


# --- bounds ---


def sharing_at_most(nbytes: int) -> tuple[Pair, SharedMemory]:
    ours, theirs = socket.socketpair()
    shared = SharedMemory(nbytes)
    ends = as_channel(ours, shared), as_channel(theirs, SharedMemory())
    greet(*ends)
    return ends, shared


def sent_aside(pair: Pair, frame: Frame) -> memoryview:
    """As `carried`, also for what the socket does not hold at once."""
    sending = threading.Thread(target=pair[0].send, args=(frame, soon()))
    sending.start()
    (payload,) = recv(pair[1]).payload
    sending.join()
    assert isinstance(payload, memoryview)
    return payload


def test_when_every_block_is_held_the_socket_carries_the_payload():
    pair, shared = sharing_at_most(3 * LARGE)
    kept = [sent_aside(pair, frame_of(byte)) for byte in range(5)]
    assert [is_shared(view) for view in kept] == [True, True, True, False, False]
    assert shared.lent_bytes == 3 * LARGE
    assert [view[0] for view in kept] == list(range(5))
    del kept[0]
    assert is_shared(sent_aside(pair, frame_of(9)))
    for end in pair:
        end.close()


def test_free_blocks_of_other_sizes_make_room_and_both_ends_forget_them():
    pair, shared = sharing_at_most(4 * LARGE)
    for byte in range(3):
        sent_aside(pair, frame_of(byte, LARGE // 5 * (byte + 1)))
    assert mapped() >= 4
    assert is_shared(sent_aside(pair, frame_of(1, 4 * LARGE)))
    assert shared.lent_bytes == 4 * LARGE
    assert mapped() == 2
    for end in pair:
        end.close()


def test_a_payload_over_the_bound_goes_through_the_socket():
    pair, shared = sharing_at_most(LARGE - 1)
    assert not is_shared(sent_aside(pair, frame_of(1)))
    assert shared.lent_bytes == 0
    for end in pair:
        end.close()


def test_the_number_of_blocks_is_bounded(pair):
    kept = [sent_aside(pair, frame_of(1, 1 << 17)) for _ in range(MOST_BLOCKS + 2)]
    assert [is_shared(view) for view in kept].count(True) == MOST_BLOCKS
    del kept[0]
    assert is_shared(sent_aside(pair, frame_of(2, 1 << 17)))


def test_a_peer_that_does_not_read_is_not_sent_more_than_a_channel_may_hold(pair, shared):
    here, there = pair
    here.send(frame_of(1, MAX_BUFFERED_BYTES), soon())
    assert shared.reserve([bytes(LARGE)]) is None
    recv(there)
    assert shared.reserve([bytes(LARGE)]) is not None


def test_a_send_that_came_too_late_gives_its_block_back(pair, shared):
    here, _ = pair
    with here._closer.sending, pytest.raises(DeadlinePassed):
        here.send(frame_of(1), time.monotonic() - 1)
    once = shared.lent_bytes
    assert is_shared(carried(pair, frame_of(2)))
    assert shared.lent_bytes == once > 0


def test_a_block_is_not_reused_before_its_send_is_over(pair, shared):
    """Its descriptor would be sent twice, which the peer refuses."""
    block = shared.reserve([bytes(LARGE)])
    with block:
        block.state[0] = FREE  # the peer was quick
        assert shared.reserve([bytes(LARGE)]) is not block
    assert shared.reserve([bytes(LARGE)]) is block


def test_memory_that_cannot_be_had_is_said_once_and_done_without(pair, shared, caplog):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with caplog.at_level(logging.WARNING, "gradwire"):
            assert [shared.reserve([bytes(LARGE)]) for _ in range(2)] == [None, None]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = caplog.records
    assert f"cannot allocate {LARGE} bytes of shared memory" in record.message
    assert shared.lent_bytes == 0
    assert is_shared(carried(pair, frame_of(1)))


# --- ends ---


def test_a_closed_channel_leaves_no_mapping_and_no_descriptor():
    before = descriptors()
    ours, theirs = socket.socketpair()
    pair = as_channel(ours, SharedMemory()), as_channel(theirs, SharedMemory())
    greet(*pair)
    for byte in range(3):
        carried(pair, frame_of(byte))
    assert descriptors() == before + 2
    pair[0].send(frame_of(4), soon())  # introduced, never received
    pair[0].send(frame_of(5), soon())
    for end in pair:
        end.close()
    assert mapped() == 0
    assert descriptors() == before


def test_a_payload_outlives_its_channel(pair):
    payload = carried(pair, frame_of(1))
    for end in pair:
        end.close()
    assert bytes(payload) == bytes([1]) * LARGE
    assert mapped() == 1
    del payload
    assert mapped() == 0


def test_a_payload_sent_before_close_arrives(pair):
    here, there = pair
    here.send(frame_of(1), soon())
    here.close()
    assert bytes(recv(there).payload[0]) == bytes([1]) * LARGE
    with pytest.raises(PeerLost, match="connection closed by peer"):
        recv(there)


def test_a_closed_channel_makes_no_block(pair, shared):
    here, _ = pair
    here.close("enough")
    with pytest.raises(PeerLost, match="closed here: enough"):
        here.send(frame_of(1), soon())
    assert mapped() == 0


# --- lies ---


def announced(number: int, is_new: int, length: int) -> bytes:
    flags = TAKES_BLOCKS | IN_BLOCK
    return prefix_of(1, flags, 0, length, 0) + NOTE.pack(number, is_new)


def tell(sock: socket.socket, said: bytes, *files: int) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files).tobytes())
    sock.sendmsg([said], [rights] if files else [])


def sealed(size: int, seals: int, *, is_allocated: bool = True) -> int:
    file = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if is_allocated:
        os.posix_fallocate(file, 0, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FILES: dict[str, tuple[Callable[[], int], str]] = {
    "no seals": (lambda: sealed(1 << 17, 0), "not sealed against resizing"),
    "may shrink": (
        lambda: sealed(1 << 17, fcntl.F_SEAL_GROW),
        "not sealed against resizing",
    ),
    "no room": (lambda: sealed(4096, BOTH), "its file has 4096 bytes"),
    "holes": (lambda: sealed(1 << 40, BOTH, is_allocated=False), "its file has"),
    "few holes": (lambda: sealed(1 << 30, BOTH, is_allocated=False), "its file has holes"),
    "read only": (
        lambda: sealed(1 << 17, BOTH | fcntl.F_SEAL_WRITE),
        "sealed against writing",
    ),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), "cannot be mapped"),
    "a directory": (lambda: os.open("/", os.O_RDONLY), "cannot be mapped"),
}


@pytest.fixture
def peer() -> Iterator[tuple[SocketChannel, socket.socket]]:
    """A channel, and a raw socket that can tell it anything."""
    ours, theirs = socket.socketpair()
    channel = as_channel(ours, SharedMemory())
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.mark.parametrize("which", FILES)
def test_a_file_that_could_hurt_is_not_mapped(peer, which):
    channel, theirs = peer
    channel.limits = Limits(payload=1 << 32)
    make_file, text = FILES[which]
    file = make_file()
    tell(theirs, announced(1, 1, 1000), file)
    os.close(file)
    with pytest.raises(BadMessage, match=f"shared block 1 .*{text}"):
        recv(channel)
    assert mapped() == 0
    with pytest.raises(PeerLost, match="closed here: shared block 1"):
        recv(channel)


ONE = 1 << 17
LIES: dict[str, list[tuple[int, int, int]]] = {
    "shared block 1 is unknown": [(1, 0, 1000)],
    "shared block 1 is known already, or one too many": [(1, 1, ONE), (1, 1, ONE)],
    f"{ONE + 1} bytes are not in shared block 1 of {ONE}": [(1, 1, ONE + 1)],
    "0 bytes are not in shared block 1": [(1, 1, 0)],
    "shared block 1 was reused while it was in use": [(1, 1, 10), (1, 0, 10)],
}


@pytest.mark.parametrize("text", LIES)
def test_a_lie_about_blocks_ends_the_channel(peer, text):
    channel, theirs = peer
    file = make_block(1, ONE).descriptors[0]
    for number, is_new, length in LIES[text]:
        tell(theirs, announced(number, is_new, length), *([file] if is_new else []))
    os.close(file)
    kept = [recv(channel) for _ in LIES[text][1:]]
    with pytest.raises(BadMessage, match=text):
        recv(channel)
    del kept
    assert mapped() == 0


def test_a_block_without_its_descriptor_says_what_may_be_wrong(peer):
    channel, theirs = peer
    tell(theirs, announced(1, 1, 1000))
    with pytest.raises(BadMessage, match="arrived without its descriptor") as caught:
        recv(channel)
    assert "ulimit" in str(caught.value)


def test_more_blocks_than_a_peer_may_have_are_refused(peer):
    channel, theirs = peer
    for number in range(MOST_BLOCKS + 1):
        file = make_block(number, 1 << 12).descriptors[0]
        tell(theirs, announced(number, 1, 10), file)
        os.close(file)
        if number < MOST_BLOCKS:
            recv(channel)
    with pytest.raises(BadMessage, match=f"block {MOST_BLOCKS} is known already, or one too many"):
        recv(channel)


def test_a_payload_in_a_block_is_measured_by_the_limits(peer):
    channel, theirs = peer
    channel.limits = Limits(payload=8)
    tell(theirs, announced(1, 1, 9))
    with pytest.raises(BadMessage, match="a payload of 9 bytes is over the limit of 8"):
        recv(channel)


def test_descriptors_that_no_frame_speaks_of_are_closed(peer):
    channel, theirs = peer
    before = descriptors()
    file = os.open("/dev/null", os.O_RDONLY)
    for _ in range(20):
        tell(theirs, prefix_of(1, 0, 0, 0, 0), *[file] * 9)
        recv(channel)
    os.close(file)
    assert descriptors() <= before + 2
    channel.close()
    assert descriptors() == before - 1


def test_a_channel_without_shared_memory_refuses_a_payload_in_a_block(peer):
    ours, theirs = socket.socketpair()
    channel = as_channel(ours, None)
    tell(theirs, announced(1, 1, 1000))
    with pytest.raises(BadMessage, match="unknown flags 0x0200"):
        recv(channel)
    theirs.close()
