"""Both ends in one process: tests, threads, notebooks, and calls of a worker to itself.

Frames go through the same prefix and limits as on a socket, and are copied once, so that nothing
here is easier than in the world. It has no threads of its own, and no process globals: two networks
do not see each other's names.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import NamedTuple, final

from msgspec.structs import replace

from gradwire.errors import BadMessage, PeerLost, UsageError
from gradwire.options import Limits
from gradwire.transport.address import parse_address
from gradwire.transport.base import (
    CLOSED_BY_PEER,
    HELD_AT_MOST,
    closed_here,
    never,
    unheard_by_deadline,
    unread_by_deadline,
)
from gradwire.transport.buffer_pool import BlockPool
from gradwire.wire.frame import Buffer, Frame, decode_prefix, encode_prefix

_GLANCE_SECONDS = 0.001
_LONGEST_WAIT_SECONDS = 1.0
_AT_ONCE = (False,)
_PATIENTLY = (True,)


class _Item(NamedTuple):
    """A frame on its way, with the prefix it would have on a wire; or words, and no frame."""

    prefix: bytes
    frame: Frame | None
    size: int


@final
class _Pipe:
    """One direction: frames in order, and room for so many bytes.

    What ends the queue is None, and it stays there for whoever asks again. Only who waits for room
    has a lock: a finalizer or a signal handler may run in the middle of `put` and `get`, and do the
    same or wait for the peer, which must be able to go on. Numbers change in one step each.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        # Open once something was put in, so that it can be waited for with a timeout. That of
        # SimpleQueue.get is forgotten by Python 3.11 when a signal handler runs meanwhile.
        self._bell = threading.Lock()
        self._put_bytes = self._got_bytes = 0
        self._waiting = 0
        self._ended = False
        self.taken = 0
        """items that are no longer in it"""
        self._room = threading.Condition(threading.RLock())

    def put(self, item: _Item, deadline: float) -> bool:
        """False if the pipe has ended; TimeoutError if there is no room by the deadline."""
        # Held bytes are compared without those of this item: a large frame then does not
        # starve behind small ones, and one larger than the whole pipe passes.
        if self._is_full():
            self._wait_for_room(deadline)
        if self._ended:
            return False
        self._put_bytes += item.size
        self._items.put(item)
        self._ring()
        return True

    def _is_full(self) -> bool:
        return self._put_bytes - self._got_bytes >= self._capacity

    def _ring(self) -> None:
        if self._bell.locked():
            with suppress(RuntimeError):  # another thread was first
                self._bell.release()

    def _wait_for_room(self, deadline: float) -> None:
        """Who makes room looks at `_waiting` afterwards, so one of the two sees the other."""
        self._waiting += 1
        try:
            while self._is_full() and not self._ended:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                with self._room:
                    if self._is_full() and not self._ended:
                        self._room.wait(min(left, _LONGEST_WAIT_SECONDS))
        finally:
            self._waiting -= 1

    def get(self, until: float, done: Callable[[], bool]) -> _Item | None:
        """The next item, or None after the last; Empty if there is none by then."""
        item = self._take(_PATIENTLY) if until == math.inf else self._get(until, done)
        if item is None:
            self._items.put(None)
            self._ring()
            return None
        if self._waiting:
            with self._room:
                self._room.notify_all()
        return item

    def _take(self, block: tuple[bool]) -> _Item | None:
        """Taken and counted in one step: see Note [Reading inside a read] in sockets/reader.py."""
        (item,) = map(self._items.get, block)
        if item is not None:
            self.taken += 1
            self._got_bytes += item.size
        return item

    def _get(self, until: float, done: Callable[[], bool]) -> _Item | None:
        longest = threading.TIMEOUT_MAX if done is never else _GLANCE_SECONDS
        while True:
            left = until - time.monotonic()
            try:
                return self._take(_AT_ONCE)
            except Empty:
                if left <= 0 or done():
                    raise
            self._bell.acquire(timeout=min(left, longest))  # what rings before is seen above

    def end(self) -> None:
        """Nothing more goes in; what is in can still be had."""
        if not self._ended:
            self._ended = True
            self._items.put(None)
            self._ring()
            with self._room:
                self._room.notify_all()

    def drop(self) -> None:
        """End, and let go of what is in: its reader is gone."""
        self.end()
        try:
            while True:
                self._items.get_nowait()
        except Empty:
            self._items.put(None)
            self._ring()


@final
class MemoryChannel:
    """One end of two pipes."""

    peer_names: tuple[str, ...] | None = None
    binding: bytes = b""
    watches_itself = True

    def __init__(
        self, remote: str, incoming: _Pipe, outgoing: _Pipe, *, limits: Limits, pool: BlockPool
    ) -> None:
        self.remote = remote
        self.limits = limits
        self.peer_names: tuple[str, ...] | None = None
        self.binding = b""
        self._incoming = incoming
        self._outgoing = outgoing
        self._pool = pool
        self._ended: str | None = None
        self._heard = b""

    def __repr__(self) -> str:
        return f"<MemoryChannel to {self.remote}: {self._ended or 'open'}>"

    @property
    def taken(self) -> int:
        """See `Channel.taken`."""
        return self._incoming.taken

    def say(self, words: bytes, deadline: float) -> None:
        """Queue the bytes; see `Channel.say`."""
        self._put(_Item(words, None, len(words)), deadline)

    def hear(self, length: int, deadline: float) -> bytes:
        """Take so many bytes of what was said; see `Channel.hear`."""
        while len(self._heard) < length:
            item = self._maybe_take(deadline)
            if item is None:
                raise unheard_by_deadline(self.remote)
            head = item.frame.head if item.frame is not None else b""
            self._heard += item.prefix + head
        heard, self._heard = self._heard[:length], self._heard[length:]
        return heard

    def lend_turn(self) -> bool:
        """See `Channel.lend_turn`: nobody has a turn here."""
        return False

    def take_turn_back(self) -> None:
        """See `Channel.lend_turn`."""

    def send(self, frame: Frame, deadline: float) -> None:
        """Copy the payload into one block and queue it; see `Channel.send`."""
        self._put(self._pack(frame), deadline)

    def _put(self, item: _Item, deadline: float) -> None:
        self._check_open()
        try:
            taken = self._outgoing.put(item, deadline)
        except TimeoutError:
            raise unread_by_deadline(self.remote) from None
        if not taken:
            self._check_open()
            raise PeerLost(CLOSED_BY_PEER)

    def recv(self) -> Frame:
        """Block for the next frame; see `Channel.recv`."""
        frame = self.maybe_recv(math.inf)
        assert frame is not None, "without a limit it waits until one comes"
        return frame

    def maybe_recv(self, until: float, done: Callable[[], bool] = never) -> Frame | None:
        """Wait so long for the next frame; see `Channel.maybe_recv`."""
        item = self._maybe_take(until, done)
        if item is None:
            return None
        try:
            if item.frame is None or self._heard:
                raise BadMessage("words without a frame, after the handshake")
            decode_prefix(item.prefix, self.limits)
        except BadMessage as refusal:
            self.close(refusal.message)
            raise
        return item.frame

    def _maybe_take(self, until: float, done: Callable[[], bool] = never) -> _Item | None:
        """The next item; None if there is none by then."""
        self._check_open()
        try:
            item = self._incoming.get(until, done)
        except Empty:
            self._check_open()
            return None
        self._check_open()
        if item is None:
            self._end(CLOSED_BY_PEER)
            raise PeerLost(CLOSED_BY_PEER)
        return item

    def close(self, reason: str = "close() was called") -> None:
        """End both directions; see `Channel.close`."""
        self._end(closed_here(reason))

    def _end(self, story: str) -> None:
        # Two threads may both pass this test, and then the later story stays: either is true.
        if self._ended is None:
            self._ended = story
        self._outgoing.end()
        self._incoming.drop()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise PeerLost(self._ended)

    def _pack(self, frame: Frame) -> _Item:
        parts = frame.payload
        length = sum(map(len, parts)) if parts else 0
        payload = (self._snapshot(parts, length),) if length else ()
        prefix = encode_prefix(frame)
        size = len(prefix) + len(frame.head) + length
        return _Item(prefix, replace(frame, payload=payload), size)

    def _snapshot(self, parts: Sequence[Buffer], length: int) -> memoryview:
        block = self._pool.take(length)
        begin = 0
        for part in parts:
            end = begin + len(part)
            block[begin:end] = part
            begin = end
        return block


@final
class MemoryListener:
    """A name in a network."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self._arrivals: SimpleQueue[MemoryChannel | None] = SimpleQueue()
        self._ended: str | None = None
        self._lock = threading.Lock()

    def accept(self) -> MemoryChannel:
        """Block for the next connection; see `Listener.accept`."""
        channel = self._arrivals.get()
        if channel is None:
            self._arrivals.put(None)
            raise PeerLost(f"{self.address} was {self._ended}")
        return channel

    def close(self, reason: str = "close() was called") -> None:
        """Give the name back and refuse those who wait; see `Listener.close`."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = closed_here(reason)
        self._network.forget(self)
        self._refuse_waiting()
        self._arrivals.put(None)

    def arrive(self, channel: MemoryChannel) -> bool:
        """Let a channel wait for `accept`; False if nobody will come for it."""
        with self._lock:
            if self._ended is None:
                self._arrivals.put(channel)
            return self._ended is None

    def _refuse_waiting(self) -> None:
        try:
            while True:
                waiting = self._arrivals.get_nowait()
                if waiting is not None:
                    waiting.close("nobody accepted it")
        except Empty:
            return


@final
class MemoryNetwork:
    """The names that can be reached, and channels between them."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        capacity: int = HELD_AT_MOST,
        pool: BlockPool | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._capacity = capacity
        self._pool = pool or BlockPool()
        self._listeners: dict[str, MemoryListener] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()

    def listen(self, address: str) -> MemoryListener:
        """Take the name, or a fresh one if it is empty."""
        name = _name_in(address)
        with self._lock:
            name = name or self._fresh_name()
            if name in self._listeners:
                raise UsageError(f"cannot listen on {address}: the name is taken")
            listener = MemoryListener(self, f"memory://{name}")
            self._listeners[name] = listener
        return listener

    def connect(self, address: str, deadline: float, name: str | None = None) -> MemoryChannel:
        """A channel to the listener of that name; there is nothing to wait for."""
        with self._lock:
            listener = self._listeners.get(_name_in(address))
        here, there = self._joined(address, f"{address} (connection {next(self._numbers)})")
        if listener is None or not listener.arrive(there):
            refusal = ConnectionRefusedError(f"nobody listens at {address}")
            raise PeerLost(f"cannot reach {address}: nobody listens there") from refusal
        return here

    def pair(self) -> tuple[MemoryChannel, MemoryChannel]:
        """Two ends without a listener, for a worker that calls itself."""
        number = next(self._numbers)
        return self._joined(f"memory://pair-{number}/b", f"memory://pair-{number}/a")

    def forget(self, listener: MemoryListener) -> None:
        """The name is free again."""
        with self._lock:
            self._listeners.pop(_name_in(listener.address), None)

    def _fresh_name(self) -> str:
        names = (f"listener-{number}" for number in self._numbers)
        return next(name for name in names if name not in self._listeners)

    def _joined(self, remote: str, other_remote: str) -> tuple[MemoryChannel, MemoryChannel]:
        there, back = _Pipe(self._capacity), _Pipe(self._capacity)
        return (
            MemoryChannel(remote, back, there, limits=self._limits, pool=self._pool),
            MemoryChannel(other_remote, there, back, limits=self._limits, pool=self._pool),
        )


def _name_in(address: str) -> str:
    parsed = parse_address(address)
    if parsed.scheme != "memory":
        raise UsageError(f"{address} is not a memory address", hint="memory://name")
    return parsed.place
