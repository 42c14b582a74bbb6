"""Links between simulated workers: a transport whose frames take time, and may never arrive.

Every frame is encoded to bytes and decoded again. A connection is as TCP's: in order, nothing lost
while it lasts; what was on its way when it ends is lost from some frame on. Between two connections
nothing is in order. What a fault may do:

    slow    frames take longer, up to seconds
    stall   nothing arrives, nothing ends, connecting takes for ever; what was held comes later
    cut     connections end, at each side at its own moment, and new ones are not answered
    repeat  a frame that the protocol lets come twice does

This file must not know what a frame means but for its kind.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, final

from gradwire.errors import BadMessage, DeadlinePassed, PeerLost, UsageError
from gradwire.options import Limits
from gradwire.testing.simulate.scheduler import Process, Scheduler, Wait
from gradwire.transport.base import (
    CLOSED_BY_PEER,
    closed_here,
    never,
    recv_raw_timed_out,
    send_timed_out,
)
from gradwire.wire.message import PREFIX, Frame, check_content, decode_prefix, encode_prefix

if TYPE_CHECKING:
    from gradwire.testing.simulate.world import World

_PROOF = "proof"
"""What bytes of a handshake are called in traces."""
_GLANCE_SECONDS = 0.005
_USUAL_SECONDS = 0.002


@final
class Link:
    """What lies between two workers: how it is, whatever connections there are."""

    def __init__(self, a: str, b: str) -> None:
        self.name = f"{a}-{b}"
        self.slowness = 1.0
        self.is_stalled = self.is_cut = False
        self.pipes: list[Pipe] = []
        self.waits: list[Wait] = []


@final
class Pipe:
    """One direction of one connection."""

    def __init__(self, network: SimulatedNetwork, link: Link, label: str) -> None:
        self._network, self._link, self._label = network, link, label
        self._scheduler = network.scheduler
        self._last = 0.0
        self._on_way: deque[tuple[bytes, str]] = deque()
        self._held: list[tuple[bytes, str]] = []
        self._inbox: deque[bytes | None] = deque()
        self._readers: list[Wait] = []
        self._writers: list[Wait] = []
        self._has_ended = self._is_unread = False
        link.pipes.append(self)

    def put(self, data: bytes, text: str, deadline: float) -> bool:
        """False if the pipe has ended; TimeoutError if there is no room by the deadline."""
        while len(self._held) >= self._network.capacity and not self._has_ended:
            if not self._scheduler.block(self._writers, deadline):
                raise TimeoutError
        if self._has_ended:
            return False
        if self._link.is_stalled:
            self._held.append((data, text))
        else:
            self._travel(data, text)
        return True

    def repeat(self, data: bytes, text: str) -> None:
        """The same once more, at once or after a while."""

        def again() -> None:
            if not self._has_ended and not self._link.is_stalled:
                self._travel(data, text)

        seconds = self._scheduler.random.choice((0.0, 0.01, 0.5))
        self._scheduler.at(self._scheduler.now + seconds, again)

    def get(self, until: float, done: Callable[[], bool]) -> bytes | None:
        """The next frame, None after the last; TimeoutError if there is none by then."""
        scheduler = self._scheduler
        while not self._inbox:
            if scheduler.now >= until or done():
                raise TimeoutError
            glance = math.inf if done is never else scheduler.now + _GLANCE_SECONDS
            limit = min(until, glance)
            scheduler.block(self._readers, None if limit == math.inf else limit)
        return self._inbox.popleft() if self._inbox[0] is not None else None

    def resume(self) -> None:
        """What was held goes on its way."""
        held, self._held = self._held, []
        for data, text in held:
            self._travel(data, text)
        self._scheduler.wake(self._writers, len(self._writers))
        if self._has_ended:
            self._scheduler.at(self._last, self._arrive_end)

    def end(self, moment: float, *, lossy: bool) -> None:
        """Nothing more goes in; the reader sees the end then, after what is still on its way."""
        if self._has_ended:
            return
        self._has_ended = True
        self._scheduler.wake(self._writers, len(self._writers))
        if lossy:
            kept = self._scheduler.random.randint(0, len(self._on_way))
            self._network.lost += len(self._on_way) - kept + len(self._held)
            while len(self._on_way) > kept:
                self._on_way.pop()
            self._held.clear()
        self._last = max(self._last, moment)
        self._scheduler.at(self._last, self._arrive_end)

    def drop(self) -> None:
        """Its reader is gone: what comes is late."""
        self._is_unread = True
        self._inbox.clear()
        self._inbox.append(None)
        self._scheduler.wake(self._readers, len(self._readers))

    def _travel(self, data: bytes, text: str) -> None:
        scheduler = self._scheduler
        seconds = scheduler.random.expovariate(1 / _USUAL_SECONDS) * self._link.slowness
        self._last = max(self._last, scheduler.now + seconds)
        self._on_way.append((data, text))
        scheduler.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if not self._on_way:
            return  # lost with the link
        data, text = self._on_way.popleft()
        if self._link.is_stalled:
            self._held.append((data, text))
        elif self._is_unread:
            self._network.late += 1
            self._network.world.note("late", self._label, text)
        else:
            self._network.world.note("arrives", self._label, text)
            self._inbox.append(data)
            self._scheduler.wake(self._readers)

    def _arrive_end(self) -> None:
        if self._held or self._link.is_stalled or self not in self._link.pipes:
            return  # `resume` arranges it again; or it has been seen
        self._link.pipes.remove(self)
        if not self._is_unread:
            self._inbox.append(None)
            self._scheduler.wake(self._readers, len(self._readers))


@final
class SimulatedChannel:
    """One end of two pipes."""

    def __init__(
        self,
        network: SimulatedNetwork,
        remote: str,
        incoming: Pipe,
        outgoing: Pipe,
        process: Process,
    ) -> None:
        self.remote = remote
        self.limits = Limits()
        self.peer_names: tuple[str, ...] | None = None
        self.binding = b""
        self.needs_heartbeat = True
        self.frames_received = 0
        self._number = next(network.scheduler.numbers)
        self._said = b""
        self._network, self.process = network, process
        self._incoming, self._outgoing = incoming, outgoing
        self._ended: str | None = None

    def __repr__(self) -> str:
        return f"<SimulatedChannel to {self.remote}: {self._ended or 'open'}>"

    def __hash__(self) -> int:
        return self._number  # sets of channels are walked in an order that the seed decides

    def send_raw(self, data: bytes, deadline: float) -> None:
        """See `Channel.send_raw`."""
        self._check_open()
        self._network.scheduler.maybe_preempt()
        self._put(data, _PROOF, deadline)

    def recv_raw(self, length: int, deadline: float) -> bytes:
        """See `Channel.recv_raw`."""
        while len(self._said) < length:
            data = self._maybe_get(deadline)
            if data is None:
                raise recv_raw_timed_out(self.remote)
            self._said += data
        heard, self._said = self._said[:length], self._said[length:]
        return heard

    def send(self, frame: Frame, deadline: float) -> None:
        """See `Channel.send`."""
        self._network.scheduler.me()
        self._check_open()
        data = b"".join((encode_prefix(frame), frame.head, *frame.payload))
        world = self._network.world
        text = world.sent(frame)
        self._network.scheduler.maybe_preempt()
        self._put(data, text, deadline)
        if world.may_repeat(frame):
            self._outgoing.repeat(data, text)

    def _put(self, data: bytes, text: str, deadline: float) -> None:
        try:
            taken = self._outgoing.put(data, text, deadline)
        except TimeoutError:
            raise send_timed_out(self.remote) from None
        if not taken:
            self._check_open()
            raise PeerLost(CLOSED_BY_PEER)

    def recv(self) -> Frame:
        """See `Channel.recv`."""
        frame = self.maybe_recv(math.inf)
        assert frame is not None
        return frame

    def maybe_recv(self, until: float, done: Callable[[], bool] = never) -> Frame | None:
        """See `Channel.maybe_recv`."""
        data = self._maybe_get(until, done)
        if data is None:
            return None
        self.frames_received += 1
        try:
            if self._said:
                raise BadMessage("raw bytes after the handshake")
            return _decoded(data, self.limits)
        except BadMessage as refusal:
            self.close(refusal.message)
            raise

    def _maybe_get(self, until: float, done: Callable[[], bool] = never) -> bytes | None:
        """What comes next; None if nothing does by then."""
        self._check_open()
        try:
            data = self._incoming.get(until, done)
        except TimeoutError:
            self._check_open()
            return None
        self._check_open()
        if data is None:
            self._end(CLOSED_BY_PEER)
            raise PeerLost(CLOSED_BY_PEER)
        return data

    def close(self, reason: str = "close() was called") -> None:
        """See `Channel.close`."""
        self._end(closed_here(reason))

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        scheduler = self._network.scheduler
        self._outgoing.end(scheduler.now + self._network.blink(), lossy=False)
        self._incoming.drop()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise PeerLost(self._ended)


def _decoded(data: bytes, limits: Limits) -> Frame:
    prefix = decode_prefix(data, limits)
    begin, end = PREFIX.size, PREFIX.size + prefix.head_length
    payload = (memoryview(bytearray(data[end:])),) if prefix.payload_length else ()
    check_content(prefix, data[begin:end], payload)
    return Frame(prefix.kind, prefix.flags, prefix.request, data[begin:end], payload)


@final
class SimulatedListener:
    """A name in the network."""

    def __init__(self, network: SimulatedNetwork, address: str, process: Process) -> None:
        self.address, self.process = address, process
        self._network = network
        self._arrivals: deque[SimulatedChannel] = deque()
        self._waits: list[Wait] = []
        self.is_closed = False

    def accept(self) -> SimulatedChannel:
        """See `Listener.accept`."""
        while not self._arrivals:
            if self.is_closed:
                raise PeerLost(f"{self.address} was closed here")
            self._network.scheduler.block(self._waits)
        return self._arrivals.popleft()

    def arrive(self, channel: SimulatedChannel) -> None:
        """Let a channel wait for `accept`."""
        self._arrivals.append(channel)
        self._network.scheduler.wake(self._waits)

    def close(self, reason: str = "close() was called") -> None:
        """See `Listener.close`."""
        self.is_closed = True
        self._network.forget(self)
        for channel in self._arrivals:
            channel.close("the listener was closed")
        self._arrivals.clear()
        self._network.scheduler.wake(self._waits, len(self._waits))


@final
class SimulatedNetwork:
    """The links of one history, and the names that can be reached over them."""

    def __init__(self, scheduler: Scheduler, world: World, capacity: int) -> None:
        self.scheduler, self.world = scheduler, world
        self.capacity = capacity
        """how many frames a stalled direction of a connection holds"""
        self.lost = self.late = 0
        """frames that went with their link, and that came when nobody read them any more"""
        self.links: dict[frozenset[str], Link] = {}
        """all that were used"""
        self._listeners: dict[str, SimulatedListener] = {}
        self._channels: list[SimulatedChannel] = []
        self._numbers = count(1)

    def link(self, a: str, b: str) -> Link:
        """What lies between these two."""
        key = frozenset((a, b))
        if key not in self.links:
            self.links[key] = Link(*sorted((a, b)))
        return self.links[key]

    def blink(self) -> float:
        """How long it takes until the other side sees an end."""
        return self.scheduler.random.expovariate(1 / _USUAL_SECONDS)

    # -- a transport

    def listen(self, address: str) -> SimulatedListener:
        """Take the name."""
        if address in self._listeners:
            raise UsageError(f"cannot listen on {address}: the name is taken")
        listener = SimulatedListener(self, address, self.scheduler.me().process)
        self._listeners[address] = listener
        return listener

    def connect(self, address: str, deadline: float, name: str | None = None) -> SimulatedChannel:
        """A channel to the listener there."""
        scheduler = self.scheduler
        here = scheduler.me().process
        there_name = address.partition("://")[2].partition(".")[0]
        link = self.link(here.name, there_name)
        scheduler.block([], min(deadline, scheduler.now + self.blink() * link.slowness))
        while link.is_stalled or link.is_cut:
            if not scheduler.block(link.waits, deadline):
                raise DeadlinePassed(f"{address} did not answer")
        listener = self._listeners.get(address)
        if listener is None or listener.process.is_dead:
            refusal = ConnectionRefusedError(f"nobody listens at {address}")
            raise PeerLost(f"cannot reach {address}: nobody listens there") from refusal
        there = Pipe(self, link, f"{here.name}>{there_name}")
        back = Pipe(self, link, f"{there_name}>{here.name}")
        mine = SimulatedChannel(self, address, back, there, here)
        peer = f"{address} (connection {next(self._numbers)})"
        theirs = SimulatedChannel(self, peer, there, back, listener.process)
        self._channels += [mine, theirs]
        listener.arrive(theirs)
        return mine

    def forget(self, listener: SimulatedListener) -> None:
        """The name is free again."""
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    # -- faults

    def cut(self, link: Link, *, silent_for: float = 0.0) -> None:
        """Its connections end, on one side perhaps only later."""
        link.is_cut = True
        for pipe in list(link.pipes):
            pipe.end(self.scheduler.now + self.blink() + silent_for, lossy=True)

    def heal(self, link: Link) -> None:
        """It is as good as new; what was stalled comes."""
        link.is_stalled = link.is_cut = False
        link.slowness = 1.0
        for pipe in list(link.pipes):
            pipe.resume()
        self.scheduler.wake(link.waits, len(link.waits))

    def crashed(self, process: Process, *, silent_for: float = 0.0) -> None:
        """A worker is gone. Its peers see that soon, or not before so many seconds."""
        for listener in list(self._listeners.values()):
            if listener.process is process:
                self.forget(listener)
        for channel in self._channels:
            if channel.process is process:
                moment = self.scheduler.now + self.blink() + silent_for
                channel._outgoing.end(moment, lossy=True)
                channel._incoming.drop()
                # Writing to a worker that is gone is an error, once that is noticed.
                self.scheduler.at(moment, partial(channel._incoming.end, 0.0, lossy=True))
        self._channels = [c for c in self._channels if c.process is not process]
