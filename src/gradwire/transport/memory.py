"""The in-process transport, for tests, threads, notebooks, and a worker that calls itself.

Frames have the same prefix and limits as on a socket and are copied once, so that code which works
here works over a network. There are no threads; each `MemoryNetwork` has its own names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import NamedTuple, final

from msgspec.structs import replace

from gradwire.errors import BadMessage, PeerLost, UsageError
from gradwire.options import Limits
from gradwire.transport import base
from gradwire.transport.address import parse_address
from gradwire.transport.buffer_pool import BlockPool
from gradwire.wire.message import Frame, decode_prefix, encode_prefix

_POLL_SECONDS = 0.001
_LONGEST_WAIT_SECONDS = 1.0
_AT_ONCE = (False,)


class _Item(NamedTuple):
    """A queued frame with its encoded prefix; or raw bytes in `prefix` and no frame."""

    prefix: bytes
    frame: Frame | None
    size: int


@final
class _Pipe:
    """One direction of a channel: a queue of frames that holds about `capacity` bytes.

    None marks its end, and is put back for the next `get`. There is no lock around `put` and `get`:
    a finalizer or a signal handler may interrupt either, and re-enter it or wait for the peer. An
    update of a counter has no function call, so under the GIL no other thread runs in it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        # Binary semaphores: a waiting thread acquires one with a timeout, `_signal` releases it. If
        # that comes first, the acquire returns at once, and the waiter looks again. Python 3.11
        # forgets the timeout of SimpleQueue.get when a signal handler runs meanwhile.
        self._nonempty, self._room = threading.Lock(), threading.Lock()
        self.put_bytes = self.got_bytes = 0
        self._ended = False
        self.frames_received = 0

    def put(self, item: _Item, deadline: float, frame: Frame | None = None) -> bool:
        """False if the pipe has ended; TimeoutError if there is no room by the deadline.

        `frame` is marked as soon as the item is in.
        """
        # The size of this item does not count: a large frame is not starved by small ones, and one
        # larger than the capacity passes.
        while self.put_bytes - self.got_bytes >= self._capacity and not self._ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._room.acquire(timeout=min(left, _LONGEST_WAIT_SECONDS))
        if self._ended:
            _signal(self._room)  # for the next thread that waits; else the next `get` wakes it
            return False
        self._append(item, item.size, frame)
        return True

    def _append(self, item: _Item | None, size: int = 0, frame: Frame | None = None) -> None:
        append = self._items.put
        self.put_bytes += size  # from here on in one step
        if frame is not None:
            frame.has_left = True
        append(item)
        _signal(self._nonempty)

    def get(self, until: float, done: Callable[[], bool]) -> _Item | None:
        """The next item, or None after the last; raises Empty if there is none by `until`."""
        polls = done is not base.never
        longest = _POLL_SECONDS if polls else threading.TIMEOUT_MAX
        while True:
            left = until - time.monotonic()
            try:
                # Removed and counted in one step: see Note [Reading inside a read] in channel.py.
                (item,) = map(self._items.get, _AT_ONCE)
                if item is not None:
                    self.frames_received += 1
                    self.got_bytes += item.size
                break
            except Empty:
                if left <= 0 or (polls and done()):
                    raise
            self._nonempty.acquire(timeout=min(left, longest))
        if item is None:
            self._append(None)
        else:
            _signal(self._room)
        return item

    def end(self) -> None:
        """Accept no more items; those in the queue can still be read."""
        if not self._ended:
            self._ended = True
            self._append(None)
            _signal(self._room)

    def drop(self) -> None:
        """End, and discard the items: the reader is gone."""
        self.end()
        with suppress(Empty):
            while True:
                self._items.get_nowait()
        self._append(None)


def _signal(semaphore: threading.Lock) -> None:
    """Wake a thread that waits to acquire it."""
    if semaphore.locked():
        with suppress(RuntimeError):  # another thread was first
            semaphore.release()


class MemoryChannel:
    """One end of a connection: a pipe in each direction; tests/simulate has others."""

    peer_names: tuple[str, ...] | None = None
    binding = b""
    needs_heartbeat = False
    shared_bytes = 0

    def __init__(
        self, remote: str, incoming: _Pipe, outgoing: _Pipe, *, limits: Limits, pool: BlockPool
    ) -> None:
        self.remote, self.limits = remote, limits
        self._incoming, self._outgoing, self._pool = incoming, outgoing, pool
        self._close_reason: str | None = None
        self._raw = b""  # received for `recv_raw` and not yet returned

    def __repr__(self) -> str:
        return f"<MemoryChannel to {self.remote}: {self._close_reason or 'open'}>"

    @property
    def frames_received(self) -> int:
        """See `Channel.frames_received`."""
        return self._incoming.frames_received

    def carried(self) -> base.Carried:
        """See `Channel.carried`."""
        return {"memory": (self._outgoing.put_bytes, self._incoming.got_bytes)}

    def send_raw(self, data: bytes, deadline: float) -> None:
        """See `Channel.send_raw`."""
        self._put(_Item(data, None, len(data)), deadline)

    def recv_raw(self, length: int, deadline: float) -> bytes:
        """See `Channel.recv_raw`."""
        while len(self._raw) < length:
            item = self._maybe_take(deadline)
            if item is None:
                raise base.recv_raw_timed_out(self.remote)
            self._raw += item.prefix + (item.frame.head if item.frame is not None else b"")
        data, self._raw = self._raw[:length], self._raw[length:]
        return data

    def send(self, frame: Frame, deadline: float) -> None:
        """Copy the payload into one block and queue it; see `Channel.send`."""
        prefix = encode_prefix(frame)
        payload: tuple[memoryview, ...] = ()
        length = sum(map(len, frame.payload)) if frame.payload else 0
        if length:
            block, begin = self._pool.take(length), 0
            for part in frame.payload:
                end = begin + len(part)
                block[begin:end] = part
                begin = end
            payload = (block,)
        size = len(prefix) + len(frame.head) + length
        self._put(_Item(prefix, replace(frame, payload=payload), size), deadline, frame)

    def _put(self, item: _Item, deadline: float, frame: Frame | None = None) -> None:
        self._check_open()
        try:
            was_put = self._outgoing.put(item, deadline, frame)
        except TimeoutError:
            raise base.send_timed_out(self.remote) from None
        if not was_put:
            self._check_open()
            raise PeerLost(base.CLOSED_BY_PEER)

    def maybe_recv(self, until: float, done: Callable[[], bool] = base.never) -> Frame | None:
        """See `Channel.maybe_recv`."""
        item = self._maybe_take(until, done)
        if item is None:
            return None
        try:
            if item.frame is None or self._raw:
                raise BadMessage("raw bytes after the handshake")
            decode_prefix(item.prefix, self.limits)
        except BadMessage as refusal:
            self.close(refusal.message)
            raise
        return item.frame

    def _maybe_take(self, until: float, done: Callable[[], bool] = base.never) -> _Item | None:
        """The next item; None if there is none by `until`."""
        self._check_open()
        try:
            item = self._incoming.get(until, done)
        except Empty:
            self._check_open()
            return None
        self._check_open()
        if item is None:
            self._end(base.CLOSED_BY_PEER)
            raise PeerLost(base.CLOSED_BY_PEER)
        return item

    def close(self, reason: str = "close() was called") -> None:
        """See `Channel.close`."""
        self._end(base.closed_here(reason))

    def _end(self, reason: str) -> None:
        # Two threads may both pass this test; the later reason stays, and either is true.
        if self._close_reason is None:
            self._close_reason = reason
        self._outgoing.end()
        self._incoming.drop()

    def _check_open(self) -> None:
        if self._close_reason is not None:
            raise PeerLost(self._close_reason)


@final
class MemoryListener:
    """A listener under a name of a network; `lock` guards the names and the order of closing."""

    def __init__(self, address: str, lock: threading.Lock, forget: Callable[[], object]) -> None:
        self.address = address
        self.backlog: SimpleQueue[MemoryChannel | None] = SimpleQueue()
        self._lock, self._forget = lock, forget
        self._close_reason: str | None = None

    def accept(self) -> MemoryChannel:
        """See `Listener.accept`."""
        channel = self.backlog.get()
        if channel is None:
            self.backlog.put(None)
            raise PeerLost(f"{self.address} was {self._close_reason}")
        return channel

    def close(self, reason: str = "close() was called") -> None:
        """Release the name and close pending connections; see `Listener.close`."""
        with self._lock:
            if self._close_reason is not None:
                return
            self._close_reason = base.closed_here(reason)
            self._forget()
        with suppress(Empty):
            while waiting := self.backlog.get_nowait():
                waiting.close("the listener was closed")
        self.backlog.put(None)


@final
class MemoryNetwork:
    """An in-process transport with its own names."""

    def __init__(
        self, *, limits: Limits | None = None, capacity: int = base.MAX_BUFFERED_BYTES
    ) -> None:
        self._limits, self._capacity, self._pool = limits or Limits(), capacity, BlockPool()
        self._listeners: dict[str, MemoryListener] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()

    def listen(self, address: str) -> MemoryListener:
        """Listen under the name, or under a new one if it is empty."""
        name = parse_address(address, "memory").place
        with self._lock:
            fresh = (f"listener-{number}" for number in self._numbers)
            name = name or next(name for name in fresh if name not in self._listeners)
            if name in self._listeners:
                raise UsageError(f"cannot listen on {address}: the name is taken")
            forget = partial(self._listeners.pop, name)
            self._listeners[name] = MemoryListener(f"memory://{name}", self._lock, forget)
            return self._listeners[name]

    def connect(self, address: str, deadline: float, name: str | None = None) -> MemoryChannel:
        """Connect to the listener of that name; this never waits."""
        here, there = self._connect(address, f"{address} (connection {next(self._numbers)})")
        with self._lock:
            listener = self._listeners.get(parse_address(address, "memory").place)
            if listener is not None:
                listener.backlog.put(there)
                return here
        refusal = ConnectionRefusedError(f"nobody listens at {address}")
        raise PeerLost(f"cannot reach {address}: nobody listens there") from refusal

    def pair(self) -> tuple[MemoryChannel, MemoryChannel]:
        """Two connected channels without a listener, for a worker that calls itself."""
        number = next(self._numbers)
        return self._connect(f"memory://pair-{number}/b", f"memory://pair-{number}/a")

    def _connect(self, remote: str, other_remote: str) -> tuple[MemoryChannel, MemoryChannel]:
        there, back = _Pipe(self._capacity), _Pipe(self._capacity)
        return (
            MemoryChannel(remote, back, there, limits=self._limits, pool=self._pool),
            MemoryChannel(other_remote, there, back, limits=self._limits, pool=self._pool),
        )
