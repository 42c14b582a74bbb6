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
from typing import Final, final

from gradwire.options import Limits, Timeouts
from gradwire.transport.base import closed_here
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import SharedMemory
from gradwire.transport.sockets.reader import FrameReader
from gradwire.transport.sockets.stream import SocketCloser, SocketLike
from gradwire.transport.sockets.writer import FrameWriter
from gradwire.wire.message import SUMS_PAYLOAD, TAKES_BLOCKS, Frame

LIMITS: Final = Limits()
STALL: Final = Timeouts().stall


@final
class SocketChannel:
    """One end of a connected stream socket, which it owns; see `Channel`.

    With `shared`, for unix sockets only, large payloads go through shared memory. With `checksum`,
    the checksum of a sent frame covers its payload too.
    """

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
        self.remote, self.peer_names, self.binding = remote, peer_names, binding
        self._sock = sock
        self._sending = threading.Lock()
        receiving = threading.RLock()  # see Note [Reading inside a read] in reader.py
        also_close = shared.close if shared else lambda: None
        self._closer = SocketCloser(sock, self._sending, receiving, also_close=also_close)
        self._reader = FrameReader(
            sock,
            self._closer,
            receiving,
            remote,
            limits=limits,
            stall=stall,
            pool=pool,
            shared=shared,
        )
        self._writer = FrameWriter(
            sock, self._closer, self._sending, remote, stall=stall, flags=flags, shared=shared
        )
        self.maybe_recv, self.recv_raw = self._reader.maybe_recv, self._reader.recv_raw
        self.send, self.send_raw = self._writer.send, self._writer.send_raw
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, as_timeval(stall))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, as_timeval(stall))

    def __repr__(self) -> str:
        return f"<SocketChannel to {self.remote}: {self._closer.close_reason or 'open'}>"

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

    def recv(self) -> Frame:
        """Block for the next frame; see `Channel.recv`."""
        frame = self.maybe_recv(math.inf)
        assert frame is not None, "without a deadline, recv waits for a frame"
        return frame

    def close(self, reason: str = "close() was called") -> None:
        """Shut the connection down; see `Channel.close`."""
        self._closer.end(closed_here(reason))


def as_timeval(seconds: float) -> bytes:
    """A duration as a C `struct timeval`; never zero, which means no timeout."""
    whole, fraction = divmod(min(max(seconds, 1e-6), 1e9), 1)
    return struct.pack("ll", int(whole), int(fraction * 1e6))
