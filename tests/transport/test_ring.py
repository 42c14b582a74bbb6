"""Small frames in shared memory: their order beside the socket, sleep, interrupts, and lies."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import BadMessage, PeerLost
from gradwire.options import Limits
from gradwire.testing.background import Background
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.ring import AWAKE, CAN_RING, HEAD, RING_BYTES, TAIL, Ring
from gradwire.transport.shared_memory import SharedMemory, can_share
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.sockets.writer import FrameWriter
from gradwire.wire.message import Frame

pytestmark = pytest.mark.skipif(not can_share() or not CAN_RING, reason="no rings on this machine")

Pair = tuple[SocketChannel, SocketChannel]


def soon() -> float:
    return time.monotonic() + 5


def frame(number: int, size: int = 20, payload: int = 0) -> Frame:
    return Frame(5, 0, number, bytes([number % 256]) * size, (b"p" * payload,) if payload else ())


def send(channel: SocketChannel, *frames: Frame) -> None:
    for one in frames:
        channel.send(one, soon())


def take(channel: SocketChannel) -> tuple[int, bytes, int]:
    came = channel.maybe_recv(soon())
    assert came is not None, "nothing came"
    return came.request, came.head, sum(map(len, came.payload))


def expected(sent: Frame) -> tuple[int, bytes, int]:
    return sent.request, sent.head, sum(map(len, sent.payload))


def writer_of(channel: SocketChannel) -> FrameWriter:
    return channel.send.__self__  # type: ignore[attr-defined]


def make_pair(limits: Limits | None = None) -> Pair:
    """Two channels with a ring from the first to the second, whose reader is awake."""
    here, there = (
        SocketChannel(
            sock,
            "unix:///peer",
            limits=limits or Limits(),
            stall=5.0,
            pool=BlockPool(),
            shared=SharedMemory(),
        )
        for sock in socket.socketpair()
    )
    send(there, frame(0))
    take(here)  # so that it knows of shared memory
    for n in range(9):
        send(here, frame(n))
        take(there)
    assert ring_of(there).words[HEAD] == 0, "nothing was in the ring yet"
    ring_of(there).words[AWAKE] = 1
    return here, there


def ring_of(channel: SocketChannel) -> Ring:
    ring = channel._ring
    assert ring is not None
    return ring


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = make_pair()
    yield here, there
    here.close()
    there.close()


def counted(channel: SocketChannel, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the channel sends through its socket from now on."""
    sent: list[bytes] = []
    writer = writer_of(channel)

    class Socket:
        def send(self, data: bytes, flags: int) -> int:
            sent.append(bytes(data))
            return writer_sock.send(data, flags)

        def __getattr__(self, name: str) -> object:
            return getattr(writer_sock, name)

    writer_sock = writer._sock
    monkeypatch.setattr(writer, "_sock", Socket())
    return sent


def test_a_small_frame_needs_no_system_call(pair, monkeypatch):
    here, there = pair
    through_socket = counted(here, monkeypatch)
    send(here, frame(1), frame(2, payload=100))

    assert take(there) == expected(frame(1))
    assert take(there) == expected(frame(2, payload=100))
    assert not through_socket


def test_a_reader_that_sleeps_gets_the_frame_through_the_socket(pair, monkeypatch):
    here, there = pair
    ring_of(there).words[AWAKE] = 0
    through_socket = counted(here, monkeypatch)
    send(here, frame(1))

    assert len(through_socket) == 1
    assert ring_of(there).words[TAIL] == 0
    assert take(there) == expected(frame(1))


def test_a_reader_that_falls_asleep_meanwhile_is_woken(pair, monkeypatch):
    here, there = pair
    through_socket = counted(here, monkeypatch)
    monkeypatch.setattr(Ring, "is_watched", lambda ring: False)
    send(here, frame(1))
    monkeypatch.undo()

    assert len(through_socket) == 1, "an empty frame"
    before = there.frames_received
    assert take(there) == expected(frame(1))
    assert there.maybe_recv(0.0) is None, "the empty frame is for the channel alone"
    assert there.frames_received == before + 1
    send(here, frame(2))
    assert take(there) == expected(frame(2))


def test_a_reader_does_not_sleep_if_an_entry_has_come(pair):
    here, there = pair
    assert ring_of(there).may_sleep()
    ring_of(there).words[AWAKE] = 1
    send(here, frame(1))

    assert not ring_of(there).may_sleep()


def test_a_sleeping_reader_is_woken_by_what_comes(pair):
    here, there = pair
    waiting = Background(lambda: take(there))
    send(here, frame(1))

    assert waiting.result() == expected(frame(1))


def test_a_frame_of_the_ring_waits_for_one_in_the_socket(pair):
    here, there = pair
    large = frame(1, payload=10_000)
    send(here, large, frame(2))

    assert not ring_of(there).next_frame(there._number) >= 0
    assert take(there) == expected(large)
    assert take(there) == expected(frame(2))


def test_a_frame_in_the_socket_waits_for_those_in_the_ring(pair):
    here, there = pair
    large = frame(3, payload=10_000)
    send(here, frame(1), frame(2), large, frame(4))

    taken = [take(there) for _ in range(4)]
    assert taken == [expected(one) for one in (frame(1), frame(2), large, frame(4))]


steps = st.lists(st.one_of(st.integers(0, 9000), st.just("read"), st.just("sleep")), max_size=60)


@given(steps)
def test_the_order_is_kept_whatever_goes_which_way(steps):
    here, there = make_pair()
    sent: list[Frame] = []
    taken = 0
    try:
        for n, step in enumerate(steps):
            if step == "sleep":
                ring_of(there).words[AWAKE] = 0
            elif step == "read":
                if taken < len(sent):
                    assert take(there) == expected(sent[taken])
                    taken += 1
                ring_of(there).words[AWAKE] = 1
            else:
                sent.append(frame(n, size=step % 4000, payload=step // 2))
                send(here, sent[-1])
        for one in sent[taken:]:
            assert take(there) == expected(one)
    finally:
        here.close()
        there.close()


def test_the_ring_is_used_again_and_again(pair, monkeypatch):
    here, there = pair
    through_socket = counted(here, monkeypatch)
    for n in range(3 * RING_BYTES // 300):
        send(here, frame(n, size=200 + n % 100))
        assert take(there) == expected(frame(n, size=200 + n % 100))

    assert not through_socket
    assert ring_of(there).place > 2 * RING_BYTES


def test_a_full_ring_leaves_the_rest_to_the_socket(pair, monkeypatch):
    here, there = pair
    through_socket = counted(here, monkeypatch)
    frames = [frame(n, size=900) for n in range(80)]
    send(here, *frames)

    assert 5 < len(through_socket) < 30
    assert [take(there) for _ in frames] == [expected(one) for one in frames]


def test_what_was_sent_before_the_end_arrives(pair):
    here, there = pair
    send(here, frame(1), frame(2))
    here.close()

    assert take(there) == expected(frame(1))
    assert take(there) == expected(frame(2))
    with pytest.raises(PeerLost, match="closed by peer"):
        there.recv()


# -- interrupts: see Note [Reading inside a read]


class Interrupted:
    """Memory whose first write runs other code on the same thread, as a finalizer does."""

    def __init__(self, memory: memoryview, inner: Callable[[], object]) -> None:
        self._memory, self._inner = memory, [inner]

    def __setitem__(self, place: object, value: object) -> None:
        self._memory[place] = value  # type: ignore[index,assignment]
        if self._inner:
            self._inner.pop()()


@pytest.mark.parametrize("inner", [frame(7), frame(7, payload=10_000)], ids=["ring", "socket"])
def test_a_send_inside_a_send_goes_first(pair, inner):
    here, there = pair
    ring = here._shared.outgoing
    assert ring is not None
    ring.data = Interrupted(ring.data, lambda: send(here, inner))  # type: ignore[assignment]
    send(here, frame(1))

    assert take(there) == expected(inner)
    assert take(there) == expected(frame(1))


def test_a_read_inside_a_read_takes_another_frame(pair, monkeypatch):
    here, there = pair
    send(here, frame(1, payload=10), frame(2, payload=10))
    slab, inner = there._slab.take, []

    def interrupted(nbytes: int) -> memoryview:
        if not inner:
            inner.append(None)
            inner.append(take(there))
        return slab(nbytes)

    monkeypatch.setattr(type(there._slab), "take", lambda _, nbytes: interrupted(nbytes))

    assert take(there) == expected(frame(2, payload=10))
    assert inner[1] == expected(frame(1, payload=10))


def interrupt_once(
    monkeypatch, owner: type, name: str, inner: Callable[[], object]
) -> list[object]:
    """Run `inner` on the thread that calls this method next, before the method."""
    found: list[object] = []
    method = getattr(owner, name)

    def interrupted(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(owner, name, method)
        found.append(inner())
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    return found


@pytest.mark.parametrize("method", ["_maybe_whole", "_maybe_in_ring", "_maybe_in_socket"])
def test_a_read_that_comes_before_a_frame_is_taken_does_not_take_it_twice(
    pair, monkeypatch, method
):
    here, there = pair
    large = frame(1, payload=10_000)
    first, second = (large, frame(2)) if method == "_maybe_in_socket" else (frame(1), frame(2))
    send(here, first, second, frame(3))
    found = interrupt_once(monkeypatch, SocketChannel, method, lambda: take(there))

    assert take(there) == expected(second)
    assert found == [expected(first)]
    assert take(there) == expected(frame(3))


def test_a_read_that_comes_before_a_wait_does_not_make_it_wait_for_the_socket(pair, monkeypatch):
    here, there = pair
    large = frame(1, payload=10_000)
    send(here, frame(0))
    ring_of(there).words[AWAKE] = 1
    is_ahead = Ring.is_ahead

    def inner() -> None:
        send(here, large, frame(2))
        assert take(there) == expected(frame(0))
        assert take(there) == expected(large)

    taken = interrupt_once(monkeypatch, Ring, "is_ahead", inner)
    assert there._await_frame(soon(), lambda: False)

    assert taken == [None]
    assert Ring.is_ahead is is_ahead
    assert take(there) == expected(frame(2))


def test_a_thread_does_not_sleep_if_an_inner_read_has_woken_the_ring(pair):
    _, there = pair
    ring_of(there).words[AWAKE] = 1

    assert there._has_read(ring_of(there), blocks=True)


# -- a peer that writes what no worker writes


def test_more_bytes_than_fit_are_refused(pair):
    here, there = pair
    send(here, frame(1))
    ring_of(there).words[TAIL] = RING_BYTES + 8

    with pytest.raises(BadMessage, match="a ring of 65536 bytes claims to hold 65544"):
        there.recv()


def test_a_wrong_checksum_is_refused(pair):
    here, there = pair
    send(here, frame(1))
    ring_of(there).data[8 + 32] ^= 1

    with pytest.raises(BadMessage, match="in a ring is not whole, or has a wrong checksum"):
        there.recv()
    with pytest.raises(PeerLost):
        there.recv()


def test_a_frame_over_the_limits_is_refused():
    here, there = make_pair(Limits(head=1000))
    send(here, frame(1, size=1001))

    with pytest.raises(BadMessage, match="over the limit of 1000"):
        there.recv()
    here.close()
    there.close()


def test_an_entry_that_is_never_next_does_not_keep_a_dead_peer_alive(pair):
    here, there = pair
    send(here, frame(1))
    ring_of(there).numbers[0] = 99
    here.close()

    with pytest.raises(PeerLost, match="closed by peer"):
        there.recv()


def test_a_ring_ends_with_its_channel(pair):
    here, there = pair
    here.close()
    with pytest.raises(PeerLost):
        there.recv()

    assert here._shared.outgoing is None
    assert there._shared.incoming is None


def test_a_place_that_is_not_the_senders_is_not_believed(pair, monkeypatch):
    here, there = pair
    through_socket = counted(here, monkeypatch)
    ring_of(there).words[HEAD] = 1 << 40
    send(here, frame(1))

    assert len(through_socket) == 1
    assert take(there) == expected(frame(1))
