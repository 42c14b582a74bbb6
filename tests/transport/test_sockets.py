"""Frames over a stream socket: what the kernel and a hostile peer can do to them."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import BadMessage, DeadlinePassed, PeerLost
from gradwire.options import Limits
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.sockets import channel as channel_module
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.sockets.stream import SocketListener
from gradwire.wire.message import Frame, encode_prefix, pack_prefix
from tests.background import Background, raised
from tests.leftovers import eventually
from tests.transport.conformance import recv

FRAME = Frame(1, 0, 7, b"head", [b"pay", b"load"])
BYTES = encode_prefix(FRAME) + b"headpayload"
HUGE = Frame(1, 0, 0, b"", [bytes(1 << 20)] * 8)


class Interrupted(BaseException):
    """What a signal handler of these tests raises, as Ctrl-C raises KeyboardInterrupt."""


class CountedSocket:
    """A socket that notes which system calls are made on it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            self.calls.append(name)
            return getattr(self._sock, name)(*args)

        return call


def soon() -> float:
    return time.monotonic() + 5


def as_channel(sock: object, stall: float = 5.0, limits: Limits | None = None) -> SocketChannel:
    return SocketChannel(
        sock,  # type: ignore[arg-type]
        "unix:///peer",
        limits=limits or Limits(),
        stall=stall,
        pool=BlockPool(),
    )


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def received(channel: SocketChannel) -> tuple[int, int, int, bytes, bytes]:
    frame = recv(channel)
    return frame.kind, frame.flags, frame.request, frame.head, b"".join(frame.payload)


def fill(sock: socket.socket) -> int:
    """Send until the kernel takes no byte more; how many it took."""
    taken = 0
    for size in (1 << 16, 1):
        try:
            while True:
                taken += sock.send(bytes(size), socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
    return taken


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        data += sock.recv(min(count - len(data), 1 << 16))
    return bytes(data)


HEARD = threading.Event()
"""whether a signal has raised"""


def in_background(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def interrupt_this_thread_once_it_is_in(function: str) -> threading.Thread:
    """Raise Interrupted here as soon as a call of that name is on our stack."""
    main = threading.get_ident()

    def is_inside() -> bool:
        frame: FrameType | None = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_name == function:
                return True
            frame = frame.f_back
        return False

    def watch() -> None:
        while not is_inside():
            os.sched_yield()
        # In the function, but maybe not yet in the kernel; either is an interrupt of a wait. One
        # that comes in between wakes nobody, so it is repeated until it was heard.
        signal.pthread_kill(main, signal.SIGUSR1)
        while not HEARD.wait(0.1):
            signal.pthread_kill(main, signal.SIGUSR1)

    return in_background(watch)


@pytest.fixture
def _signals_raise() -> Iterator[None]:
    """The first one does."""
    HEARD.clear()

    def handler(*_: object) -> None:
        if not HEARD.is_set():
            HEARD.set()
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    HEARD.set()
    signal.signal(signal.SIGUSR1, before)


# --- the bytes ---


def test_a_frame_is_its_prefix_its_head_and_its_payload(pair):
    ours, theirs = pair
    as_channel(ours).send(FRAME, soon())
    assert theirs.recv(1000) == BYTES


def test_a_frame_may_arrive_byte_by_byte(pair):
    ours, theirs = pair

    def drip() -> None:
        for byte in BYTES * 3:
            theirs.send(bytes([byte]))

    dripping = in_background(drip)
    channel = as_channel(ours)
    for _ in range(3):
        assert received(channel) == (1, 0, 7, b"head", b"payload")
    dripping.join()


def test_a_small_frame_costs_one_system_call_at_each_end(pair):
    ours, theirs = map(CountedSocket, pair)
    near, far = as_channel(ours), as_channel(theirs)
    ours.calls.clear()
    theirs.calls.clear()
    for _ in range(3):
        near.send(Frame(1, 0, 0, b"no-op", ()), soon())
        recv(far)
    near.send(FRAME, soon())
    recv(far)
    near.send(Frame(1, 0, 0, b"", [bytes(3000), bytes(3000)]), soon())
    recv(far)
    assert ours.calls == ["send", "send", "send", "send", "sendmsg"]
    assert theirs.calls == ["recv_into"] * 5


def test_frames_that_arrived_together_are_read_together(pair):
    ours, theirs = pair
    counted = CountedSocket(ours)
    channel = as_channel(counted)
    counted.calls.clear()
    theirs.sendall(BYTES * 100)
    for _ in range(100):
        assert received(channel) == (1, 0, 7, b"head", b"payload")
    assert counted.calls == ["recv_into"]


class Parcelled(CountedSocket):
    """A socket that gives and takes only so many bytes at a time."""

    def __init__(self, sock: socket.socket, sizes: Iterator[int]) -> None:
        super().__init__(sock)
        self._sizes = sizes

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        return self._sock.recv_into(buffer[: next(self._sizes)], nbytes, flags)

    def send(self, data: bytes, flags: int = 0) -> int:
        return self._sock.send(data[: next(self._sizes)], flags)


@pytest.mark.parametrize("checksum", [False, True])
@given(
    frames=st.lists(
        st.builds(
            Frame,
            st.integers(0, 0xFFFF),
            st.integers(0, 1),
            st.integers(0, (1 << 64) - 1),
            st.binary(max_size=60),
            st.lists(st.binary(max_size=700), max_size=3),
        ),
        max_size=5,
    ),
    sizes=st.lists(st.integers(20, 1500), min_size=1, max_size=5),
)
def test_a_frame_is_the_same_however_it_is_cut_on_its_way(frames, sizes, checksum):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = {"limits": Limits(), "stall": 5.0, "pool": BlockPool(), "checksum": checksum}
        sender = SocketChannel(Parcelled(ours, cycle(sizes)), "", **made)
        receiver = SocketChannel(Parcelled(theirs, cycle(sizes)), "", **made)
        for frame in frames:
            sender.send(frame, soon())
            body = b"".join(frame.payload)
            expected = (frame.kind, frame.flags, frame.request, frame.head, body)
            assert received(receiver) == expected


@pytest.mark.parametrize("before", [0, 1, 1000])
@pytest.mark.parametrize("size", [65503, 65504, 65505, 65536, 300_000])
def test_a_head_that_does_not_fit_into_the_read_ahead_buffer_is_read(pair, size, before):
    ours, theirs = map(as_channel, pair)
    small = [Frame(2, 0, n, bytes([n % 256]), ()) for n in range(before)]
    large = Frame(1, 0, 7, bytes(range(256)) * (size // 256) + bytes(size % 256), [b"x" * 5000])
    frames = [*small, large, FRAME, large, FRAME]

    sending = in_background(lambda: [ours.send(frame, soon()) for frame in frames])
    for frame in frames:
        expected = (frame.kind, 0, frame.request, frame.head, b"".join(frame.payload))
        assert received(theirs) == expected
    sending.join()
    assert len(theirs._ahead) == 1 << 16


def test_what_the_kernel_takes_of_a_small_frame_in_parts_is_finished(pair):
    ours, theirs = pair
    sending = Parcelled(ours, iter([10, 1, 1000]))
    as_channel(sending).send(FRAME, soon())
    assert theirs.recv(1000) == BYTES


def test_the_rest_of_a_small_frame_goes_behind_its_sender_when_its_deadline_is_over(pair):
    ours, theirs = pair
    channel = as_channel(Parcelled(ours, iter([10, 1, 1000])))
    channel.send(FRAME, time.monotonic() - 1)
    assert read_exactly(theirs, len(BYTES)) == BYTES
    assert eventually(lambda: not finishers())


@pytest.mark.usefixtures("_signals_raise")
def test_an_interrupt_as_a_small_frame_leaves_ends_the_channel(pair):
    class Interrupting(CountedSocket):
        def send(self, data: bytes, flags: int = 0) -> int:
            count = self._sock.send(data[:10], flags)
            signal.raise_signal(signal.SIGUSR1)
            return count

    channel = as_channel(Interrupting(pair[0]))
    with pytest.raises(Interrupted):
        channel.send(FRAME, soon())
    with pytest.raises(PeerLost, match="closed here: interrupted in the middle of a message"):
        channel.send(FRAME, soon())


def test_a_part_that_is_not_bytes_is_our_bug_and_ends_the_channel(pair):
    channel = as_channel(pair[0])
    with pytest.raises(AssertionError, match="a payload part is not a view of single bytes"):
        channel.send(Frame(1, 0, 0, b"", [memoryview(array("d", [1.0] * 5000))]), soon())
    with pytest.raises(PeerLost, match="closed here: interrupted in the middle of a message"):
        recv(channel)


# --- deadlines and stalls ---


def test_a_deadline_passes_before_the_first_byte_and_the_channel_stays_usable(pair):
    ours, theirs = pair
    taken = fill(ours)
    channel = as_channel(ours)
    for deadline in (time.monotonic() + 0.01, time.monotonic() - 1):
        with pytest.raises(DeadlinePassed, match="unix:///peer did not accept a message before"):
            channel.send(FRAME, deadline)
    read_exactly(theirs, taken)
    channel.send(FRAME, soon())
    assert theirs.recv(1000) == BYTES


def test_a_send_that_waits_for_room_goes_on_when_there_is_some(pair):
    ours, theirs = pair
    taken = fill(ours)
    sending = in_background(lambda: as_channel(ours).send(FRAME, soon()))
    read_exactly(theirs, taken)
    assert read_exactly(theirs, len(BYTES)) == BYTES
    sending.join()


def test_a_frame_that_can_go_at_once_goes_however_late(pair):
    ours, theirs = pair
    as_channel(ours).send(FRAME, time.monotonic() - 1)
    assert theirs.recv(1000) == BYTES


def test_a_deadline_may_be_infinitely_far(pair):
    ours, theirs = pair
    taken = fill(ours)
    channel = as_channel(ours)
    sending = [in_background(lambda: channel.send(FRAME, float("inf"))) for _ in range(2)]
    assert read_exactly(theirs, taken + 2 * len(BYTES))[taken:] == BYTES * 2
    for each in sending:
        each.join()


def finishers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "gradwire send unix:///peer"]


def test_what_is_not_through_at_its_deadline_is_finished_behind_its_sender(pair):
    ours, theirs = map(as_channel, pair)
    payload = bytearray(b"x" * (1 << 23))
    ours.send(Frame(1, 0, 7, b"head", [payload]), time.monotonic() + 0.05)  # nobody reads
    payload[:] = bytes(len(payload))
    with pytest.raises(DeadlinePassed, match="did not accept a message before its deadline"):
        ours.send(FRAME, time.monotonic())

    assert received(theirs) == (1, 0, 7, b"head", b"x" * (1 << 23))
    ours.send(FRAME, soon())
    assert received(theirs) == (1, 0, 7, b"head", b"payload")
    assert eventually(lambda: not finishers())


def test_what_is_not_through_at_its_deadline_ends_with_the_channel(pair):
    ours = as_channel(pair[0])
    ours.send(HUGE, time.monotonic())
    assert len(finishers()) == 1

    ours.close()

    assert eventually(lambda: not finishers())


def test_nobody_waits_longer_for_a_peer_that_stops_reading_if_the_sender_is_gone(pair):
    ours = as_channel(pair[0], stall=0.05)
    ours.send(HUGE, time.monotonic() + 0.01)

    assert eventually(lambda: not finishers())
    with pytest.raises(PeerLost, match=r"no byte moved for 0.05 s in the middle of a message"):
        ours.send(FRAME, soon())


def test_a_peer_that_stops_reading_within_a_message_is_given_up(pair):
    channel = as_channel(pair[0], stall=0.02)
    with pytest.raises(PeerLost, match=r"no byte moved for 0.02 s in the middle of a message"):
        channel.send(HUGE, soon())
    with pytest.raises(PeerLost, match=r"closed here: no byte moved for 0.02 s"):
        recv(channel)


@pytest.mark.parametrize("already_sent", [1, 24, 26, 30])
def test_a_peer_that_stops_sending_within_a_message_is_given_up(pair, already_sent):
    ours, theirs = pair
    theirs.sendall(BYTES[:already_sent])
    channel = as_channel(ours, stall=0.02)
    with pytest.raises(PeerLost, match=r"no byte moved for 0.02 s in the middle of a message"):
        recv(channel)
    assert theirs.recv(1) == b""


def test_a_peer_that_has_nothing_to_say_is_not_given_up(pair):
    ours, theirs = pair
    channel = as_channel(ours, stall=0.002)
    got: list[Frame] = []
    reading = in_background(lambda: got.append(recv(channel)))
    reading.join(0.02)
    assert reading.is_alive()
    theirs.sendall(BYTES)
    reading.join()
    assert got[0].request == 7


# --- ends ---


@pytest.mark.parametrize("already_sent", [1, 24, 26, 30])
def test_a_connection_that_ends_within_a_message_says_so(pair, already_sent):
    ours, theirs = pair
    theirs.sendall(BYTES[:already_sent])
    theirs.close()
    channel = as_channel(ours)
    for _ in range(2):
        with pytest.raises(PeerLost, match="connection closed by peer in the middle of a message"):
            recv(channel)


@pytest.mark.parametrize("already_sent", [0, 1, 26])
def test_a_reset_is_told_as_a_close_is(already_sent):
    """Which of the two a dead process leaves depends on what it had not read."""
    said = "connection closed by peer" + " in the middle of a message" * bool(already_sent)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    channel = as_channel(ours)
    theirs.sendall(BYTES[:already_sent])
    began = Background(partial(recv, channel))
    if already_sent:  # a reset would discard what has not been read yet
        assert eventually(lambda: not channel.needs_heartbeat)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    errors = [began.error(PeerLost), raised(PeerLost, partial(recv, channel))]
    errors.append(raised(PeerLost, lambda: channel.send(FRAME, soon())))
    assert [str(error) for error in errors] == [said] * 3
    assert isinstance(errors[0].__cause__, ConnectionResetError)


def test_a_send_to_a_peer_that_left_says_so(pair):
    ours, theirs = pair
    theirs.close()
    channel = as_channel(ours)
    for _ in range(2):
        with pytest.raises(PeerLost, match=r"^connection closed by peer$"):
            channel.send(FRAME, soon())
    channel.close()


def test_another_error_of_the_system_ends_the_channel(pair):
    class Failing(CountedSocket):
        def send(self, *_: object) -> int:
            raise OSError(errno.ENETDOWN, "Network is down")

    channel = as_channel(Failing(pair[0]))
    with pytest.raises(PeerLost, match=r"^network is down$"):
        channel.send(Frame(1, 0, 0, b"", ()), soon())
    with pytest.raises(PeerLost, match=r"^network is down$"):
        recv(channel)


def test_a_descriptor_is_closed_when_its_last_user_is_gone(pair):
    ours, _ = pair
    channel = as_channel(ours)
    lost = []

    def use(call: Callable[[], object]) -> None:
        try:
            call()
        except PeerLost as error:
            lost.append(error.message)

    threads = [in_background(lambda: use(partial(recv, channel)))]
    threads += [in_background(lambda: use(lambda: channel.send(HUGE, soon()))) for _ in range(2)]
    threads[0].join(0.01)
    threads += [in_background(channel.close) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert lost == ["closed here: close() was called"] * 3
    assert ours.fileno() == -1


def test_a_channel_shows_its_state(pair):
    channel = as_channel(pair[0])
    assert repr(channel) == "<SocketChannel to unix:///peer: open>"
    channel.close("enough")
    assert repr(channel) == "<SocketChannel to unix:///peer: closed here: enough>"


# --- promises ---


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(head=3), "a message head of 4 bytes is over the limit of 3"),
        (Limits(payload=6), "a payload of 7 bytes is over the limit of 6"),
    ],
)
def test_what_is_over_the_limits_is_refused_also_if_all_of_it_is_there(pair, limits, reason):
    ours, theirs = pair
    theirs.sendall(BYTES)
    with pytest.raises(BadMessage, match=reason):
        recv(as_channel(ours, limits=limits))


def test_a_promise_over_the_limits_is_refused_before_any_of_it_arrives(pair):
    ours, theirs = pair
    theirs.sendall(pack_prefix(1, 0, 0, 1001, 0))
    with pytest.raises(BadMessage, match="a payload of 1001 bytes is over the limit of 1000"):
        recv(as_channel(ours, limits=Limits(payload=1000)))
    assert theirs.recv(1) == b""


def test_a_promise_alone_takes_no_memory(pair):
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    ours, theirs = pair
    theirs.sendall(pack_prefix(1, 0, 0, 1 << 30, 0) + b"that was all")
    theirs.shutdown(socket.SHUT_WR)
    before = resident()
    with pytest.raises(PeerLost, match="in the middle of a message") as caught:
        recv(as_channel(ours))
    assert caught.tb is not None  # which keeps the block alive
    assert resident() - before < 64 << 20


def test_a_promise_of_more_than_there_is_ends_the_channel(pair):
    ours, theirs = pair
    theirs.sendall(pack_prefix(1, 0, 0, 1 << 50, 0))
    with pytest.raises(PeerLost, match=f"closed here: no memory for a payload of {1 << 50} bytes"):
        recv(as_channel(ours, limits=Limits(payload=1 << 60)))


# --- interrupts ---


@pytest.mark.usefixtures("_signals_raise")
def test_an_interrupt_while_nothing_arrives_leaves_the_channel_usable(pair):
    ours, theirs = pair
    channel = as_channel(ours)
    interrupt_this_thread_once_it_is_in("_await_frame")
    with pytest.raises(Interrupted):
        recv(channel)
    theirs.sendall(BYTES)
    assert received(channel) == (1, 0, 7, b"head", b"payload")


@pytest.mark.usefixtures("_signals_raise")
def test_an_interrupt_while_a_full_pipe_is_waited_for_leaves_the_channel_usable(pair):
    ours, theirs = pair
    taken = fill(ours)
    channel = as_channel(ours)
    interrupt_this_thread_once_it_is_in("wait_until_ready")
    with pytest.raises(Interrupted):
        channel.send(FRAME, soon())
    read_exactly(theirs, taken)
    channel.send(FRAME, soon())
    assert theirs.recv(1000) == BYTES


@pytest.mark.usefixtures("_signals_raise")
def test_an_interrupt_within_a_message_leaves_what_came_for_the_next_who_reads(pair):
    ours, theirs = pair
    theirs.sendall(BYTES[:26])
    channel = as_channel(ours)
    interrupt_this_thread_once_it_is_in("_wait_for_more")
    with pytest.raises(Interrupted):
        recv(channel)
    theirs.sendall(BYTES[26:])
    assert bytes(recv(channel).payload[0]) == b"payload"


@pytest.mark.parametrize("seconds", [4, 60], ids=["a deadline before the stall", "after it"])
@pytest.mark.usefixtures("_signals_raise")
def test_an_interrupt_within_a_send_ends_the_channel(pair, seconds):
    ours, theirs = pair
    channel = as_channel(ours)
    interrupt_this_thread_once_it_is_in("_go_on")
    with pytest.raises(Interrupted):
        channel.send(HUGE, time.monotonic() + seconds)
    with pytest.raises(PeerLost, match="closed here: interrupted in the middle of a message"):
        channel.send(FRAME, soon())
    theirs.close()


class SocketWithFinalizer(socket.socket):
    """A socket on which something runs in the middle of the first send, with the send lock held."""

    inner: Callable[[], object] | None = None

    def send(self, data: bytes, flags: int = 0) -> int:
        inner, self.inner = self.inner, None
        if inner is not None:
            inner()
        return super().send(data, flags)


def test_two_sends_that_interrupt_sends_the_other_way_round_both_finish(pair):
    """Each thread holds the send lock of one channel, and its finalizer sends on the other."""
    others = socket.socketpair()
    socks = [SocketWithFinalizer(fileno=each[0].detach()) for each in (pair, others)]
    channels = [as_channel(sock) for sock in socks]
    both_hold_theirs = threading.Barrier(2, timeout=5)
    for sock, other in zip(socks, reversed(channels), strict=True):
        sock.inner = lambda other=other: (both_hold_theirs.wait(), other.send(FRAME, soon()))

    second = Background(lambda: channels[1].send(FRAME, soon()))
    channels[0].send(FRAME, soon())
    second.result()

    for theirs in (pair[1], others[1]):
        assert read_exactly(theirs, 2 * len(BYTES)) == 2 * BYTES
    for each in (*channels, *others):
        each.close()


def test_no_interrupt_at_the_entry_of_a_function_keeps_the_send_lock():
    """Python runs signal handlers there, so a KeyboardInterrupt may come before the first line."""
    entered = 0
    while True:
        ours, theirs = socket.socketpair()
        channel = as_channel(ours)
        entered += 1
        left = entered

        def at_entry(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            left -= "gradwire" in frame.f_code.co_filename
            if not left:
                sys.settrace(None)
                raise Interrupted

        sys.settrace(at_entry)
        try:
            channel.send(FRAME, soon())
            is_over = True
        except Interrupted:
            is_over = False
        finally:
            sys.settrace(None)
        channel.close()
        theirs.close()
        assert ours.fileno() == -1, f"kept after an interrupt at the {entered}. entry"
        if is_over:
            break
    assert entered > 1


# --- listeners ---


class Troubled:
    """A listening socket whose first accepts fail."""

    def __init__(self, sock: socket.socket, *errors: int) -> None:
        self._sock = sock
        self._errors = list(errors)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, object]:
        if self._errors:
            number = self._errors.pop()
            raise OSError(number, os.strerror(number))
        return self._sock.accept()


@pytest.mark.parametrize("error", [errno.ECONNABORTED, errno.EMFILE])
def test_trouble_with_one_connection_does_not_end_the_listener(error):
    server = socket.create_server(("127.0.0.1", 0))
    listener = SocketListener(
        Troubled(server, error),  # type: ignore[arg-type]
        "tcp://there:1",
        as_channel,
    )
    ours = socket.create_connection(server.getsockname())
    accepted = listener.accept()
    accepted.send(FRAME, soon())
    assert ours.recv(1000) == BYTES
    accepted.close()
    ours.close()
    listener.close()


def test_a_connection_that_cannot_be_wrapped_is_dropped_and_the_next_one_taken():
    server = socket.create_server(("127.0.0.1", 0))
    outcomes: list[Exception | None] = [OSError("no longer there")]

    def wrap(sock: socket.socket) -> SocketChannel:
        if outcomes:
            raise outcomes.pop() or AssertionError
        return as_channel(sock)

    listener = SocketListener(server, "tcp://there:1", wrap)
    first, second = (socket.create_connection(server.getsockname()) for _ in range(2))
    accepted = listener.accept()
    assert first.recv(1) == b""
    assert repr(listener) == "<SocketListener on tcp://there:1: open>"
    for each in (first, second, accepted, listener):
        each.close()


def test_a_prefix_that_an_inner_read_has_taken_is_not_judged(pair, monkeypatch):
    """An interrupt just before it is looked at reads it, and reads over it."""
    ours, theirs = pair
    channel = as_channel(ours)
    first, second = BYTES, BYTES + BYTES
    theirs.sendall(first[: len(BYTES) - 3])
    decode, inner = channel_module.decode_prefix, []

    def interrupted(*args):
        if not inner:
            inner.append(None)
            theirs.sendall(first[len(BYTES) - 3 :])
            inner.append(recv(channel))
            channel._ahead[:64] = bytes(64)
        return decode(*args)

    monkeypatch.setattr(channel_module, "decode_prefix", interrupted)
    waker = threading.Thread(target=lambda: (inner_is_there(inner), theirs.sendall(second)))
    waker.start()
    outer = recv(channel)
    waker.join()

    assert bytes(inner[1].payload[0]) == bytes(outer.payload[0]) == b"payload"


def inner_is_there(inner):
    assert eventually(lambda: len(inner) == 2)
