"""A proxy between two workers that does to their bytes what networks and their boxes do.

    cut, reset      end what is connected, by FIN or by RST; a new connection gets through
    stall, heal     nothing passes, one way or both, and neither end is told
    slow, slice     so many bytes a second; pieces of so many bytes
    harm            one frame is flipped, truncated, dropped, doubled, swapped with the next one …

It reads plain TCP and knows where frames begin. Over TLS it sees none: there a frame is whatever
came in one piece.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import cast, final

from gradwire.agent.links.handshake_state import HEAD_BYTES, body_length
from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.rpc.worker import Worker
from gradwire.transport.address import Address, parse_address
from gradwire.wire.message import PREFIX, Message, Prefix, kind_of

HARMS = ("flip", "truncate", "drop", "duplicate", "swap", "stall", "cut", "reset")
_HANDSHAKE_MESSAGES = 2  # that each end says before its first frame
_CHUNK = 1 << 16
_CONNECT_SECONDS = 10.0
_JOIN_SECONDS = 5.0


class Way(Enum):
    """From the client to the worker behind the proxy, or back."""

    THERE = "there"
    BACK = "back"


@dataclass(slots=True)
class _Harm:
    what: str
    kind: int | None
    way: Way | None
    nth: int
    met: int = 0

    def is_due(self, way: Way, kind: int | None) -> bool:
        """Whether this is the frame; counts it if it might be."""
        if self.way not in (None, way) or self.kind not in (None, kind):
            return False
        self.met += 1
        return self.met == self.nth


class _Ended(Exception):
    """The connection is over."""


@final
class FaultProxy:
    """Clients that connect to its `address` reach the worker behind it; `seed` decides chances.

    >>> with FaultProxy("tcp://127.0.0.1:4242") as proxy:
    ...     proxy.harm("flip", Gradients)
    """

    def __init__(self, target: str, *, seed: int = 0) -> None:
        self.target = parse_address(target)
        if self.target.port is None:
            raise UsageError(f"a proxy speaks tcp, not {target}", hint="Options(listen='tcp://…')")
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.stalled: set[Way] = (
            set()
        )  # ways that nothing passes; guarded by `changed`, as the rest
        self.rate: float | None = None  # bytes a second
        self.piece = _CHUNK  # bytes at a time
        self.harms: list[_Harm] = []
        self._pairs: list[_Pair] = []
        self.passed = {Way.THERE: 0, Way.BACK: 0}  # bytes that have passed each way

    @property
    def address(self) -> str:
        """Where to connect."""
        host, port = self._listener.getsockname()[:2]
        return str(Address(self.target.scheme, host, port))

    def __enter__(self) -> FaultProxy:
        is_v6 = ":" in self.target.place
        self._listener = socket.create_server(
            ("::1" if is_v6 else "127.0.0.1", 0),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        )
        self._acceptor = threading.Thread(target=self._accept, name="proxy accept", daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(_JOIN_SECONDS)
        self._listener.close()
        self.heal()
        for pair in self._end(is_reset=False):
            pair.thread.join(_JOIN_SECONDS)

    # -- what may go wrong

    def cut(self) -> None:
        """End what is connected, as a worker does that closes its socket."""
        self._end(is_reset=False)

    def reset(self) -> None:
        """End what is connected by a RST, as a firewall does that has lost its state."""
        self._end(is_reset=True)

    def stall(self, way: Way | None = None) -> None:
        """Nothing passes this way, or none; what is sent is taken until buffers are full."""
        with self.changed:
            self.stalled |= {way} if way else set(Way)

    def heal(self) -> None:
        """Everything passes, at once; what has not happened will not."""
        with self.changed:
            self.stalled, self.rate, self.piece = set(), None, _CHUNK
            self.harms = [harm for harm in self.harms if harm.met >= harm.nth]
            self.changed.notify_all()

    def slow(self, bytes_per_second: float) -> None:
        """So many bytes each way."""
        self.rate = bytes_per_second

    def slice(self, size: int) -> None:
        """What passes comes in pieces of so many bytes."""
        self.piece = size

    def harm(
        self, what: str, kind: type[Message] | None = None, *, way: Way | None = None, nth: int = 1
    ) -> None:
        """To the nth frame from now, of those of this kind that go this way; see HARMS."""
        if what not in HARMS:
            raise UsageError(f"a proxy cannot {what!r} a frame", hint=", ".join(HARMS))
        with self.changed:
            self.harms.append(_Harm(what, None if kind is None else kind_of(kind), way, nth))

    def fired(self) -> int:
        """How many of the harms have happened."""
        with self.changed:
            return sum(harm.met >= harm.nth for harm in self.harms)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            place = (self.target.place or "127.0.0.1", self.target.port or 0)
            try:
                far = socket.create_connection(place, _CONNECT_SECONDS)
            except OSError:
                near.close()
                continue
            with self.changed:
                self._pairs.append(_Pair(self, near, far))

    def _end(self, *, is_reset: bool) -> list[_Pair]:
        with self.changed:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.end(is_reset=is_reset)
        return pairs


@final
class _Pair:
    """A connection to the proxy and the one behind it, with a thread for each way."""

    def __init__(self, proxy: FaultProxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy = proxy
        self._sockets = (near, far)
        self._ended, self._wake = socket.socketpair()
        self._is_over = self._is_reset = False
        for sock in self._sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.thread = threading.Thread(target=self._run, name="proxy pump", daemon=True)
        self.thread.start()

    def end(self, *, is_reset: bool = False) -> None:
        """From any thread; the pumps notice."""
        changed = self._proxy.changed
        with changed:
            self._is_reset |= is_reset
            self._is_over = True
            with suppress(OSError):
                self._wake.send(b"x")
            changed.notify_all()

    def _run(self) -> None:
        near, far = self._sockets
        back = threading.Thread(
            target=self._pump, args=(Way.BACK, far, near), name="proxy pump", daemon=True
        )
        back.start()
        self._pump(Way.THERE, near, far)
        back.join()
        for sock in self._sockets:
            if self._is_reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        self._ended.close()
        self._wake.close()

    def _pump(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        held = b""
        try:
            for kind, data in self._units(source):
                held = self._pass(way, sink, kind, data, held)
            self._pour(way, sink, held)
        except (_Ended, OSError):
            pass
        finally:
            self.end()

    def _pass(
        self, way: Way, sink: socket.socket, kind: int | None, data: bytes, held: bytes
    ) -> bytes:
        """Send one unit, or do what is due to it; returns what is held back until the next."""
        proxy = self._proxy
        with proxy.changed:
            due = [harm.what for harm in proxy.harms if harm.is_due(way, kind)]
        for what in due:
            match what:
                case "flip":
                    with proxy.changed:
                        place, bit = proxy.random.randrange(len(data)), proxy.random.randrange(8)
                    data = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
                case "drop":
                    data = b""
                case "duplicate":
                    data += data
                case "swap":
                    return data
                case "stall":
                    self._pour(way, sink, data[: len(data) // 2])
                    data = data[len(data) // 2 :]
                    proxy.stall(way)
                case _:
                    if what == "truncate":
                        self._pour(way, sink, data[: len(data) // 2])
                    self.end(is_reset=what == "reset")
                    raise _Ended
        self._pour(way, sink, data + held)
        return b""

    def _units(self, source: socket.socket) -> Iterator[tuple[int | None, bytes]]:
        """What comes, piece by piece: the handshake, then frames with their kinds."""
        if self._proxy.target.scheme != "tcp":
            while chunk := self._some(source):
                yield None, chunk
            return
        with suppress(EOFError):
            for _ in range(_HANDSHAKE_MESSAGES):
                head = self._exactly(source, HEAD_BYTES)
                yield None, head + self._exactly(source, body_length(head))
            while True:
                start = self._exactly(source, PREFIX.size)
                prefix = Prefix(*PREFIX.unpack(start))
                rest = self._exactly(source, prefix.head_length + prefix.payload_length)
                yield prefix.kind, start + rest

    def _some(self, source: socket.socket, most: int = _CHUNK) -> bytes:
        while True:
            try:
                return source.recv(most)
            except BlockingIOError:
                self._wait(source, select.POLLIN)

    def _exactly(self, source: socket.socket, size: int) -> bytes:
        parts = []
        while size:
            part = self._some(source, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _pour(self, way: Way, sink: socket.socket, data: bytes) -> None:
        left = memoryview(data)
        while left:
            size, rate = self._proxy.piece, self._proxy.rate
            self._hold(way, 0.0 if rate is None else min(size, len(left)) / rate)
            try:
                sent = sink.send(left[:size])
            except BlockingIOError:
                self._wait(sink, select.POLLOUT)
                continue
            self._proxy.passed[way] += sent
            left = left[sent:]

    def _hold(self, way: Way, seconds: float) -> None:
        """While nothing passes, and for as long as it takes to pass."""
        changed = self._proxy.changed
        with changed:
            if seconds:
                changed.wait_for(lambda: self._is_over, seconds)
            changed.wait_for(lambda: self._is_over or way not in self._proxy.stalled)
        if self._is_over:
            raise _Ended

    def _wait(self, sock: socket.socket, what: int) -> None:
        poll = select.poll()
        poll.register(sock, what)
        poll.register(self._ended, select.POLLIN)
        poll.poll()
        if self._is_over:
            raise _Ended


# -- in the way of a worker


def redirect(worker: str, address: str) -> str:
    """From now on the worker whose code this is dials another there; where it did until now."""
    here = cast(Worker, current_worker.find())
    number = here.directory.number(worker)
    before = here.directory.address(number)
    with here.directory.lock:
        here.directory._add(replace(here.directory._by_id[number], address=address))
    here.agent.hang_up(number, f"{worker} is reached by another way now")
    return before


@contextmanager
def proxied(worker: str, *, seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy between the worker whose code this is and another, which listens on tcp."""
    here = cast(Worker, current_worker.find())
    target = here.directory.address(here.directory.number(worker))
    with FaultProxy(target, seed=seed) as proxy:
        redirect(worker, proxy.address)
        try:
            yield proxy
        finally:
            redirect(worker, target)
