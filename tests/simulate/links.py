"""Links between simulated workers: a transport whose frames take time, and may never arrive.

Channels and listeners are those of the in-memory transport; only the pipes between them differ. A
connection is as TCP's: in order, nothing lost while it lasts; what was on its way when it ends is
lost from some frame on. Between two connections nothing is in order. What a fault may do:

    slow    frames take longer, up to seconds
    stall   nothing arrives, nothing ends, connecting takes for ever; what was held comes later
    cut     connections end, at each side at its own moment, and new ones are not answered
    repeat  a frame that the protocol lets come twice does

This file must not know what a frame means but for its kind.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from queue import Empty
from typing import TYPE_CHECKING, final

from msgspec.structs import replace

from gradwire.errors import DeadlinePassed, PeerLost, UsageError
from gradwire.options import Limits
from gradwire.transport.base import never
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.memory import MemoryChannel, MemoryListener, _Item
from gradwire.wire.message import Frame
from tests.simulate.scheduler import Process, Scheduler, Wait

if TYPE_CHECKING:
    from tests.simulate.world import World

_PROOF = "proof"  # what bytes of a handshake are called in traces
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
    """One direction of one connection, with the methods of the in-memory transport's."""

    def __init__(self, network: SimulatedNetwork, link: Link, label: str) -> None:
        self._network, self._link, self._label = network, link, label
        self._scheduler = network.scheduler
        self._last = 0.0
        self._on_way: deque[tuple[_Item, str]] = deque()
        self._held: list[tuple[_Item, str]] = []
        self._inbox: deque[_Item | None] = deque()
        self._readers: list[Wait] = []
        self._writers: list[Wait] = []
        self._has_ended = self._is_unread = False
        self.frames_received = self.put_bytes = self.got_bytes = 0
        link.pipes.append(self)

    def put(self, item: _Item, deadline: float, sent: Frame | None = None) -> bool:
        """False if the pipe has ended; TimeoutError if there is no room by the deadline.

        `sent` is marked as soon as the item is in.
        """
        world, frame = self._network.world, item.frame
        text = _PROOF if frame is None else world.sent(frame)
        self._scheduler.maybe_preempt()
        while len(self._held) >= self._network.capacity and not self._has_ended:
            if not self._scheduler.block(self._writers, deadline):
                raise TimeoutError
        if self._has_ended:
            return False
        if sent is not None:
            sent.has_left = True
        self.put_bytes += item.size
        if self._link.is_stalled:
            self._held.append((item, text))
        else:
            self._travel(item, text)
        if frame is not None and world.may_repeat(frame):
            self._repeat(item, frame, text)
        return True

    def _repeat(self, item: _Item, frame: Frame, text: str) -> None:
        """Send a copy, at once or after a while."""
        payload = [memoryview(bytearray(part)) for part in frame.payload]
        copied = item._replace(frame=replace(frame, payload=payload))

        def again() -> None:
            if not self._has_ended and not self._link.is_stalled:
                self._travel(copied, text)

        seconds = self._scheduler.random.choice((0.0, 0.01, 0.5))
        self._scheduler.at(self._scheduler.now + seconds, again)

    def get(self, until: float, done: Callable[[], bool]) -> _Item | None:
        """The next item, None after the last; raises Empty if there is none by then."""
        scheduler = self._scheduler
        while not self._inbox:
            if scheduler.now >= until or done():
                raise Empty
            glance = math.inf if done is never else scheduler.now + _GLANCE_SECONDS
            scheduler.block(self._readers, min(until, glance))
        if self._inbox[0] is None:
            return None
        self.frames_received += 1
        item = self._inbox.popleft()
        assert item is not None
        self.got_bytes += item.size
        return item

    def resume(self) -> None:
        """What was held goes on its way."""
        held, self._held = self._held, []
        for item, text in held:
            self._travel(item, text)
        self._scheduler.wake(self._writers, len(self._writers))
        if self._has_ended:
            self._scheduler.at(self._last, self._arrive_end)

    def end(self, moment: float | None = None, *, lossy: bool = False) -> None:
        """Nothing more goes in; the reader sees the end then, after what is still on its way."""
        moment = self._scheduler.now + self._network.blink() if moment is None else moment
        if self._has_ended:
            return
        self._has_ended = True
        self._scheduler.wake(self._writers, len(self._writers))
        if lossy:
            kept = self._scheduler.random.randint(0, len(self._on_way))
            lost = len(self._on_way) - kept + len(self._held)
            self._network.world.counts["lost frames"] += lost
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

    def _travel(self, item: _Item, text: str) -> None:
        scheduler = self._scheduler
        seconds = scheduler.random.expovariate(1 / _USUAL_SECONDS) * self._link.slowness
        self._last = max(self._last, scheduler.now + seconds)
        self._on_way.append((item, text))
        scheduler.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if not self._on_way:
            return  # lost with the link
        item, text = self._on_way.popleft()
        if self._link.is_stalled:
            self._held.append((item, text))
        elif self._is_unread:
            self._network.world.counts["late frames"] += 1
            self._network.world.note("late", self._label, text)
        else:
            self._network.world.note("arrives", self._label, text)
            self._inbox.append(item)
            self._scheduler.wake(self._readers)

    def _arrive_end(self) -> None:
        if self._held or self._link.is_stalled or self not in self._link.pipes:
            return  # `resume` arranges it again; or it has been seen
        self._link.pipes.remove(self)
        if not self._is_unread:
            self._inbox.append(None)
            self._scheduler.wake(self._readers, len(self._readers))


@final
class SimulatedChannel(MemoryChannel):
    """One end of two pipes."""

    needs_heartbeat = True

    def __init__(
        self, network: SimulatedNetwork, remote: str, pipes: tuple[Pipe, Pipe], process: Process
    ) -> None:
        super().__init__(remote, *pipes, limits=Limits(), pool=network.pool)  # type: ignore[arg-type]
        self.pipes, self.process = pipes, process
        self._number = next(network.scheduler.numbers)

    def __hash__(self) -> int:
        return self._number  # sets of channels are walked in an order that the seed decides


@final
class SimulatedNetwork:
    """The links of one history, and the names that can be reached over them."""

    def __init__(self, scheduler: Scheduler, world: World, capacity: int) -> None:
        self.scheduler, self.world = scheduler, world
        self.capacity = capacity  # how many frames a stalled direction of a connection holds
        self.links: dict[frozenset[str], Link] = {}  # all that were used
        self.pool = BlockPool()
        self._listeners: dict[str, tuple[Process, MemoryListener]] = {}
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

    def listen(self, address: str) -> MemoryListener:
        """Take the name."""
        if address in self._listeners:
            raise UsageError(f"cannot listen on {address}: the name is taken")
        forget = partial(self._listeners.pop, address, None)
        listener = MemoryListener(address, threading.Lock(), forget)
        self._listeners[address] = (self.scheduler.me().process, listener)
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
        process, listener = self._listeners.get(address, (None, None))
        if process is None or listener is None:
            refusal = ConnectionRefusedError(f"nobody listens at {address}")
            raise PeerLost(f"cannot reach {address}: nobody listens there") from refusal
        there = Pipe(self, link, f"{here.name}>{there_name}")
        back = Pipe(self, link, f"{there_name}>{here.name}")
        mine = SimulatedChannel(self, address, (back, there), here)
        peer = f"{address} (connection {next(self._numbers)})"
        theirs = SimulatedChannel(self, peer, (there, back), process)
        self._channels += [mine, theirs]
        listener.backlog.put(theirs)
        return mine

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
        for address, (owner, _) in list(self._listeners.items()):
            if owner is process:
                del self._listeners[address]
        for channel in self._channels:
            if channel.process is process:
                incoming, outgoing = channel.pipes
                moment = self.scheduler.now + self.blink() + silent_for
                outgoing.end(moment, lossy=True)
                incoming.drop()
                # Writing to a worker that is gone is an error, once that is noticed.
                self.scheduler.at(moment, partial(incoming.end, 0.0, lossy=True))
        self._channels = [c for c in self._channels if c.process is not process]
