"""What every transport owes: checks of the contract in `transport/base.py`, for any channel.

    for check in CHANNEL_CHECKS:
        check(make_pair)

`make_pair` gives two connected channels. A check fails with AssertionError, ends the channels it
made, and never waits longer than `PATIENCE` for what should happen at once. This file must not know
any particular transport, nor a test framework.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from gradwire.errors import BadMessage, DeadlinePassed, GradwireError, PeerLost
from gradwire.options import Limits
from gradwire.transport.base import MAX_BUFFERED_BYTES, Channel
from gradwire.wire.message import Buffer, Frame
from tests.background import PATIENCE, Background, expect, raised

MakePair: TypeAlias = Callable[[], tuple[Channel, Channel]]
Check: TypeAlias = Callable[[MakePair], None]

_MOMENT = 0.01
_MEGABYTE = bytes(1 << 20)
_CLOG = Frame(3, 0, 0, b"", [_MEGABYTE] * (MAX_BUFFERED_BYTES // len(_MEGABYTE) + 1))


def frames_keep_their_order(make_pair: MakePair) -> None:
    """Hundreds of frames of all sizes arrive whole, as they were sent, and are counted."""
    sizes = [0, 1, 23, 100, 4096, 30_000, 65_511, 65_512, 65_513, 65_536, 65_537, 200_000]
    sent = [
        _frame(number, head=_pattern(sizes[number % 12]), payload=[_pattern(sizes[number % 7])])
        for number in range(120)
    ]
    with _connected(make_pair) as (here, there):
        before = there.frames_received
        sender = Background(lambda: _send(here, *sent))
        for expected in sent:
            _expect_same(recv(there), expected)
        sender.result()
        counted = there.frames_received - before
        expect(counted == len(sent), f"{counted} frames were counted")


def both_ends_count_the_same_bytes(make_pair: MakePair) -> None:
    """What one end has sent is what the other has received, by each way."""
    with _connected(make_pair) as (here, there):
        before = here.carried()
        for size in (0, 10, 5_000, 300_000, 1 << 20):
            for sender, receiver in ((here, there), (there, here)):
                sending = Background(partial(_send, sender, _frame(payload=[bytes(size)])))
                recv(receiver)
                sending.result()
        for ends in (here.carried(), there.carried()), (there.carried(), here.carried()):
            sent = {way: out for way, (out, _) in ends[0].items()}
            received = {way: into for way, (_, into) in ends[1].items()}
            expect(sent == received, f"sent {sent}, received {received}")
        after, payloads = here.carried(), 10 + 5_000 + 300_000 + (1 << 20)
        total = sum(out - before[way][0] for way, (out, _) in after.items())
        expect(payloads < total < payloads + 1000, f"{total} bytes were counted")


def kind_flags_and_request_arrive(make_pair: MakePair) -> None:
    """The largest values of the prefix, and the smallest."""
    with _connected(make_pair) as (here, there):
        for frame in (
            Frame(0xFFFF, 1, (1 << 64) - 1, b"head", [b"payload"]),
            Frame(0, 0, 0, b"", []),
        ):
            _send(here, frame)
            _expect_same(recv(there), frame)


def nothing_but_a_prefix_is_a_frame(make_pair: MakePair) -> None:
    """Without head and payload, or with empty parts only; then the payload holds no buffer."""
    payloads: list[list[Buffer]] = [[], [b""], [b"", bytearray(), memoryview(b"")]]
    with _connected(make_pair) as (here, there):
        for parts in payloads:
            _send(here, _frame(payload=parts))
            expect(len(recv(there).payload) == 0, "an empty payload arrived as a buffer")


def a_payload_of_many_parts_arrives_as_one_block(make_pair: MakePair) -> None:
    """More parts than one system call takes, some of them empty, of every type of buffer."""
    parts: list[Buffer] = []
    for number in range(1000):
        part = _pattern(number % 37)
        parts += [part, bytearray(part), memoryview(part)]
    with _connected(make_pair) as (here, there):
        sender = Background(lambda: _send(here, _frame(payload=parts)))
        received = recv(there)
        expect(len(received.payload) == 1, f"{len(received.payload)} blocks instead of one")
        _expect_same(received, _frame(payload=parts))
        sender.result()


def a_received_payload_is_writable_bytes(make_pair: MakePair) -> None:
    """It is one memoryview, and the receiver may write to it."""
    with _connected(make_pair) as (here, there):
        _send(here, _frame(payload=[b"abc"]))
        (block,) = recv(there).payload
        expect(isinstance(block, memoryview), f"the payload is a {type(block).__name__}")
        assert isinstance(block, memoryview)
        expect(block.format == "B" and not block.readonly, "the payload is not writable bytes")
        block[:] = b"xyz"


def a_large_payload_arrives(make_pair: MakePair) -> None:
    """Eight megabytes, in one part and in several, and a head larger than any read-ahead."""
    large = _pattern(1 << 23)
    view = memoryview(large)
    uneven = [view[:1], view[1:4_000_000], view[4_000_000:]]
    frames = [
        _frame(1, payload=[large]),
        _frame(2, head=_pattern(300_000), payload=uneven),
        _frame(3, head=b"after"),
    ]
    with _connected(make_pair) as (here, there):
        sender = Background(lambda: _send(here, *frames))
        for frame in frames:
            _expect_same(recv(there), frame)
        sender.result()


def a_frame_is_a_snapshot(make_pair: MakePair) -> None:
    """What is written to a buffer after send has returned does not arrive."""
    small, large = bytearray(b"before"), bytearray(b"b" * 100_000)
    parts: list[Buffer] = [small, large]
    with _connected(make_pair) as (here, there):
        _send(here, _frame(payload=parts))
        small[:], large[:] = b"after!", b"a" * 100_000
        parts.clear()
        _expect_same(recv(there), _frame(payload=[b"before", b"b" * 100_000]))


def a_block_is_not_used_again_while_it_is_held(make_pair: MakePair) -> None:
    """Payloads that are kept stay what they were, whatever arrives after them."""
    with _connected(make_pair) as (here, there):
        kept = []
        for number in range(20):
            _send(here, _frame(payload=[bytes([number]) * 5000]))
            kept.append(recv(there).payload[0])
        for number, block in enumerate(kept):
            expect(bytes(block) == bytes([number]) * 5000, f"payload {number} was overwritten")


def both_directions_flow_at_once(make_pair: MakePair) -> None:
    """Several senders at each end with more than any buffer holds; nothing waits for ever."""
    payload = [_pattern(1 << 20)]

    def sends(channel: Channel, sender: int) -> None:
        for number in range(3):
            _send(channel, Frame(number, 0, sender, b"", payload))

    def receives(channel: Channel) -> None:
        seen = {1: 0, 2: 0}
        for _ in range(6):
            frame = recv(channel)
            expect(frame.kind == seen[frame.request], f"sender {frame.request} was reordered")
            _expect_same(frame, Frame(frame.kind, 0, frame.request, b"", payload))
            seen[frame.request] += 1

    with _connected(make_pair) as ends:
        work = [Background(partial(receives, end)) for end in ends]
        work += [Background(partial(sends, end, sender)) for end in ends for sender in (1, 2)]
        for each in work:
            each.result()


def close_wakes_recv(make_pair: MakePair) -> None:
    """A thread that waits for a frame learns that we closed, and why."""
    with _connected(make_pair) as (here, _):
        reader = Background(partial(recv, here))
        expect(reader.is_blocked(), "recv returned, though nothing was sent")
        here.close("enough")
        _expect_says(reader.error(PeerLost), "closed here: enough")


def close_wakes_a_blocked_sender(make_pair: MakePair) -> None:
    """A thread in the middle of a frame that nobody reads, and one that waits behind it."""
    with _connected(make_pair) as (here, _):
        senders = [Background(lambda: _send(here, _CLOG, _CLOG)) for _ in range(2)]
        expect(all(sender.is_blocked() for sender in senders), "send returned, though unread")
        here.close("enough")
        for sender in senders:
            _expect_says(sender.error(PeerLost), "closed here: enough")


def the_peers_close_wakes_a_blocked_sender(make_pair: MakePair) -> None:
    """A peer that closes ends the wait of a thread that sends to it."""
    with _connected(make_pair) as (here, there):
        sender = Background(lambda: _send(here, _CLOG, _CLOG))
        expect(sender.is_blocked(), "send returned, though unread")
        there.close()
        _expect_says(sender.error(PeerLost), "by peer")


def frames_sent_before_close_arrive(make_pair: MakePair) -> None:
    """The end is seen after the last frame, and again each time one asks."""
    with _connected(make_pair) as (here, there):
        for number in range(3):
            _send(here, _frame(number, payload=[_pattern(20_000)]))
        here.close()
        for number in range(3):
            _expect_same(recv(there), _frame(number, payload=[_pattern(20_000)]))
        for _ in range(2):
            _expect_says(raised(PeerLost, partial(recv, there)), "connection closed by peer")


def a_peer_that_left_can_still_be_heard_by_one_who_sends(make_pair: MakePair) -> None:
    """A send that fails because the peer left does not throw away what it said before."""
    with _connected(make_pair) as (here, there):
        _send(there, _frame(7))
        there.close()
        raised(PeerLost, lambda: _send(here, _CLOG, _CLOG))
        _expect_same(recv(here), _frame(7))
        _expect_says(raised(PeerLost, partial(recv, here)), "by peer")


def a_closed_channel_stays_closed(make_pair: MakePair) -> None:
    """Send and recv raise, closing again does nothing, and the first reason is kept."""
    with _connected(make_pair) as (here, there):
        _send(there, _frame(payload=[b"unread"]))
        here.close("first")
        here.close("second")
        _expect_says(raised(PeerLost, lambda: _send(here, _frame())), "closed here: first")
        _expect_says(raised(PeerLost, partial(recv, here)), "closed here: first")


def a_frame_over_the_limits_is_refused(make_pair: MakePair) -> None:
    """By the number it promises; the channel is closed, and says why."""
    over_head = _frame(head=b"123456789")
    over_payload = _frame(payload=[b"12345", b"6789"])
    for frame, limits, text in (
        (over_head, Limits(head=8), "a message head of 9 bytes is over the limit of 8"),
        (over_payload, Limits(payload=8), "a payload of 9 bytes is over the limit of 8"),
        (Frame(0, 4, 0, b"", []), Limits(), "a frame has unknown flags 0x0004"),
    ):
        with _connected(make_pair) as (here, there):
            there.limits = limits
            _send(here, frame)
            _expect_says(raised(BadMessage, partial(recv, there)), text)
            _expect_says(raised(PeerLost, partial(recv, there)), f"closed here: {text}")
            _expect_says(raised(PeerLost, partial(recv, here)), "by peer")


def limits_can_be_widened_later(make_pair: MakePair) -> None:
    """Each frame is measured by the limits that stand when it is received."""
    with _connected(make_pair) as (here, there):
        there.limits = Limits(head=4, payload=1)
        _send(here, _frame(head=b"1234"))
        recv(there)
        there.limits = Limits()
        _send(here, _frame(head=b"12345", payload=[b"12"]))
        _expect_same(recv(there), _frame(head=b"12345", payload=[b"12"]))


def a_deadline_holds_on_a_full_pipe(make_pair: MakePair) -> None:
    """It names the peer, nothing of the frame has left, and the channel is as good as before."""
    with _connected(make_pair) as (here, there):
        sender, sent = Background(lambda: _send(here, _CLOG)), [_CLOG]

        def send_small_ones() -> None:
            # Until the sender has begun, small frames still go; each of them is received below.
            while True:
                here.send(_frame(1), time.monotonic() + _MOMENT)
                sent.append(_frame(1))

        late = raised(DeadlinePassed, send_small_ones)
        _expect_says(late, f"{here.remote} did not accept a message before its deadline")
        received = [recv(there) for _ in sent]
        sender.result()
        large = [frame for frame in received if frame.payload]
        expect(len(large) == 1, "the frame that filled the pipe did not arrive once")
        _expect_same(large[0], _CLOG)
        _send(here, _frame(2))
        _expect_same(recv(there), _frame(2))


def words_go_before_frames(make_pair: MakePair) -> None:
    """Bytes arrive as they are, in any portions; the frame that follows them is untouched."""
    with _connected(make_pair) as (here, there):
        here.send_raw(b"one", _soon())
        here.send_raw(b"two three", _soon())
        _send(here, _frame(7, payload=[b"a payload"]))
        for expected in (b"on", b"etwo", b" three"):
            heard = there.recv_raw(len(expected), _soon())
            expect(heard == expected, f"{heard!r} was heard, not {expected!r}")
        _expect_same(recv(there), _frame(7, payload=[b"a payload"]))


def hear_gives_up_at_its_deadline(make_pair: MakePair) -> None:
    """Even if some of the bytes have come; and it is woken by the end of either side."""
    with _connected(make_pair) as (here, there):
        here.send_raw(b"abc", _soon())
        late = raised(DeadlinePassed, lambda: there.recv_raw(4, time.monotonic() + _MOMENT))
        _expect_says(late, there.remote)
    with _connected(make_pair) as (here, there):
        listener = Background(lambda: there.recv_raw(4, _soon()))
        here.send_raw(b"abc", _soon())
        here.close()
        _expect_says(listener.error(PeerLost), "by peer")
    with _connected(make_pair) as (_, there):
        listener = Background(lambda: there.recv_raw(4, _soon()))
        expect(listener.is_blocked(), "hear returned, though nothing was said")
        there.close("enough")
        _expect_says(listener.error(PeerLost), "closed here: enough")


def the_remote_end_has_an_address(make_pair: MakePair) -> None:
    """One that can be put into an error."""
    with _connected(make_pair) as ends:
        for end in ends:
            expect("://" in end.remote, f"{end.remote!r} is not an address")


CHANNEL_CHECKS: tuple[Check, ...] = (
    frames_keep_their_order,
    both_ends_count_the_same_bytes,
    kind_flags_and_request_arrive,
    nothing_but_a_prefix_is_a_frame,
    a_payload_of_many_parts_arrives_as_one_block,
    a_received_payload_is_writable_bytes,
    a_large_payload_arrives,
    a_frame_is_a_snapshot,
    a_block_is_not_used_again_while_it_is_held,
    both_directions_flow_at_once,
    close_wakes_recv,
    close_wakes_a_blocked_sender,
    the_peers_close_wakes_a_blocked_sender,
    frames_sent_before_close_arrive,
    a_peer_that_left_can_still_be_heard_by_one_who_sends,
    a_closed_channel_stays_closed,
    a_frame_over_the_limits_is_refused,
    limits_can_be_widened_later,
    a_deadline_holds_on_a_full_pipe,
    words_go_before_frames,
    hear_gives_up_at_its_deadline,
    the_remote_end_has_an_address,
)


def recv(channel: Channel) -> Frame:
    """The next frame, however long it takes."""
    frame = channel.maybe_recv(math.inf)
    assert frame is not None, "without a deadline, it waits for a frame"
    return frame


def check_channel(make_pair: MakePair) -> None:
    """Every check, one after the other."""
    for check in CHANNEL_CHECKS:
        check(make_pair)


@contextmanager
def _connected(make_pair: MakePair) -> Iterator[tuple[Channel, Channel]]:
    here, there = make_pair()
    try:
        yield here, there
    finally:
        here.close("the check is over")
        there.close("the check is over")


def _frame(number: int = 0, head: bytes = b"", payload: Sequence[Buffer] = ()) -> Frame:
    return Frame(3, 0, number, head, payload)


def _pattern(length: int) -> bytes:
    return (bytes(range(251)) * (length // 251 + 1))[:length]


def _soon() -> float:
    return time.monotonic() + PATIENCE


def _send(channel: Channel, *frames: Frame) -> None:
    for frame in frames:
        channel.send(frame, _soon())


def _expect_says(error: GradwireError, text: str) -> None:
    expect(text in error.message, f"{error.message!r} does not say {text!r}")


def _expect_same(received: Frame, sent: Frame) -> None:
    without = [replace(frame, payload=()) for frame in (received, sent)]
    expect(without[0] == without[1], f"{without[0]!r:.200} arrived, not {without[1]!r:.200}")
    same = b"".join(received.payload) == b"".join(sent.payload)
    expect(same, f"the payload of frame {sent.request} arrived changed")
