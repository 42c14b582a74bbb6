"""A channel over a stream socket of any family; shared by unix, tcp and tls.

The socket is blocking, with kernel timeouts of `stall` seconds (SO_SNDTIMEO, SO_RCVTIMEO). So a
small frame costs one system call at each end, a large one a few, and the kernel reports with EAGAIN
that no byte moved for that long. See writer.py for sending, reader.py for receiving.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable
from typing import final

from gradwire.errors import PeerLost
from gradwire.options import Limits, Timeouts
from gradwire.transport.base import closed_here, never, recv_raw_timed_out
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import SharedMemory
from gradwire.transport.sockets.reader import FrameReader
from gradwire.transport.sockets.stream import SocketCloser, SocketLike
from gradwire.transport.sockets.writer import FrameWriter
from gradwire.wire.frame import (
    SUMS_PAYLOAD,
    TAKES_BLOCKS,
    Frame,
)


@final
class SocketChannel:
    """One end of a connected stream socket, which it owns.

    With `shared`, for unix sockets only, large payloads go through shared memory.
    """

    peer_names: tuple[str, ...] | None = None
    binding: bytes = b""

    def __init__(
        self,
        sock: SocketLike,
        remote: str,
        *,
        limits: Limits,
        stall: float,
        pool: BlockPool,
        shared: SharedMemory | None = None,
        checksum: bool = False,
        peer_names: tuple[str, ...] | None = None,
        binding: bytes = b"",
    ) -> None:
        flags = (TAKES_BLOCKS if shared else 0) | (SUMS_PAYLOAD if checksum else 0)
        self.remote = remote
        self.peer_names, self.binding = peer_names, binding
        self._sock = sock
        self._sending = threading.Lock()
        self._receiving = threading.RLock()  # see Note [Reading inside a read] in reader.py
        also_close = shared.close if shared else lambda: None
        self._closer = SocketCloser(sock, self._sending, self._receiving, also_close=also_close)
        self._reader = FrameReader(
            sock, self._closer, limits=limits, stall=stall, pool=pool, shared=shared
        )
        self._writer = FrameWriter(
            sock, self._closer, self._sending, remote, stall=stall, flags=flags, shared=shared
        )
        self.send, self.release_send_lock = self._writer.send, self._writer.release_send_lock
        self.reacquire_send_lock = self._writer.reacquire_send_lock
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, as_timeval(stall))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, as_timeval(stall))

    @property
    def limits(self) -> Limits:
        """See `Channel.limits`."""
        return self._reader.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._reader.limits = limits

    @property
    def needs_heartbeat(self) -> bool:
        """See `Channel.needs_heartbeat`."""
        return not self._reader.is_midway

    @property
    def frames_received(self) -> int:
        """See `Channel.frames_received`."""
        return self._reader.frames_received

    def __repr__(self) -> str:
        return f"<SocketChannel to {self.remote}: {self._closer.close_reason or 'open'}>"

    def close(self, reason: str = "close() was called") -> None:
        """Shut the connection down; see `Channel.close`."""
        self._closer.end(closed_here(reason))

    def send_raw(self, data: bytes, deadline: float) -> None:
        """Send raw bytes; see `Channel.send_raw`."""
        self._writer.transmit([data], (), deadline)

    def recv_raw(self, length: int, deadline: float) -> bytes:
        """Read raw bytes; see `Channel.recv_raw`."""
        try:
            with self._receiving:
                if self._closer.close_reason is not None:
                    raise PeerLost(self._closer.close_reason)
                heard = self._reader.exactly(length, deadline)
        finally:
            if self._closer.close_reason is not None:
                self._closer.close_if_unused()
        if heard is None:
            raise recv_raw_timed_out(self.remote)
        return heard

    def recv(self) -> Frame:
        """Block for the next frame; see `Channel.recv`."""
        frame = self.maybe_recv(math.inf)
        assert frame is not None, "without a deadline, recv waits for a frame"
        return frame

    def maybe_recv(self, until: float, done: Callable[[], bool] = never) -> Frame | None:
        """Wait for the next frame; see `Channel.maybe_recv`.

        hot: benchmarks of round trips and of bandwidth
        """
        try:
            with self._receiving:
                if self._closer.close_reason is not None:
                    raise PeerLost(self._closer.close_reason)
                return self._reader.next(until, done)
        finally:
            if self._closer.close_reason is not None:
                self._closer.close_if_unused()


@final
class ChannelFactory:
    """Makes the channels of one transport, with the same limits and one buffer pool.

    `share` makes the shared memory of a channel, if channels have some. With `checksum`, the
    checksum of a sent frame covers its payload too.
    """

    def __init__(
        self,
        limits: Limits | None,
        stall: float | None,
        pool: BlockPool | None,
        share: Callable[[], SharedMemory] | None = None,
        checksum: bool = False,
    ) -> None:
        self._checksum = checksum
        self._limits = limits or Limits()
        self._pool = pool or BlockPool()
        self._share = share
        self.stall = Timeouts().stall if stall is None else stall

    def channel(
        self,
        sock: SocketLike,
        remote: str,
        peer_names: tuple[str, ...] | None = None,
        binding: bytes = b"",
    ) -> SocketChannel:
        """A channel over a connected socket, which it then owns."""
        return SocketChannel(
            sock,
            remote,
            limits=self._limits,
            stall=self.stall,
            pool=self._pool,
            shared=self._share() if self._share else None,
            checksum=self._checksum,
            peer_names=peer_names,
            binding=binding,
        )


def as_timeval(seconds: float) -> bytes:
    """A duration as a C `struct timeval`; never zero, which means no timeout."""
    whole, fraction = divmod(min(max(seconds, 1e-6), 1e9), 1)
    return struct.pack("ll", int(whole), int(fraction * 1e6))
