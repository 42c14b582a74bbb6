"""Frames over a stream socket, whatever its family; shared by unix, tcp and tls.

The socket is a blocking one with kernel timeouts of `stall` seconds (SO_SNDTIMEO, SO_RCVTIMEO). A
small frame then costs one system call at each end, a large one few, and the kernel itself says when
nothing moved for that long: EAGAIN. See writer.py for what is sent, and reader.py for what comes.

This file must not know addresses, nor what a frame means.
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
from gradwire.transport.base import closed_here, never, unheard_by_deadline
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import SharedMemory
from gradwire.transport.sockets.reader import Intake
from gradwire.transport.sockets.stream import Guard, Stream
from gradwire.transport.sockets.writer import Outlet
from gradwire.wire.frame import (
    SUMS_PAYLOAD,
    TAKES_BLOCKS,
    Frame,
)


@final
class SocketChannel:
    """One end of a connected stream socket, which it owns.

    With `shared`, which is for unix sockets, large payloads go beside it.
    """

    peer_names: tuple[str, ...] | None = None
    binding: bytes = b""

    def __init__(
        self,
        sock: Stream,
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
        self._guard = Guard(sock, self._sending, self._receiving, also_close=also_close)
        self._intake = Intake(
            sock, self._guard, limits=limits, stall=stall, pool=pool, shared=shared
        )
        self._outlet = Outlet(
            sock, self._guard, self._sending, remote, stall=stall, flags=flags, shared=shared
        )
        self.send, self.lend_turn = self._outlet.send, self._outlet.lend_turn
        self.take_turn_back = self._outlet.take_turn_back
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, as_timeval(stall))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, as_timeval(stall))

    @property
    def limits(self) -> Limits:
        """See `Channel.limits`."""
        return self._intake.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._intake.limits = limits

    @property
    def watches_itself(self) -> bool:
        """See `Channel.watches_itself`."""
        return self._intake.is_midway

    @property
    def taken(self) -> int:
        """See `Channel.taken`."""
        return self._intake.taken

    def __repr__(self) -> str:
        return f"<SocketChannel to {self.remote}: {self._guard.story or 'open'}>"

    def close(self, reason: str = "close() was called") -> None:
        """Shut the connection down; see `Channel.close`."""
        self._guard.end(closed_here(reason))

    def say(self, words: bytes, deadline: float) -> None:
        """Give the bytes to the kernel; see `Channel.say`."""
        self._outlet.transmit([words], (), deadline)

    def hear(self, length: int, deadline: float) -> bytes:
        """Take so many bytes from the kernel; see `Channel.hear`."""
        try:
            with self._receiving:
                if self._guard.story is not None:
                    raise PeerLost(self._guard.story)
                heard = self._intake.exactly(length, deadline)
        finally:
            if self._guard.story is not None:
                self._guard.settle()
        if heard is None:
            raise unheard_by_deadline(self.remote)
        return heard

    def recv(self) -> Frame:
        """Block for the next frame; see `Channel.recv`."""
        frame = self.maybe_recv(math.inf)
        assert frame is not None, "without a limit it waits until one comes"
        return frame

    def maybe_recv(self, until: float, done: Callable[[], bool] = never) -> Frame | None:
        """Wait so long for the next frame; see `Channel.maybe_recv`.

        hot: benchmarks of round trips and of bandwidth
        """
        try:
            with self._receiving:
                if self._guard.story is not None:
                    raise PeerLost(self._guard.story)
                return self._intake.next(until, done)
        finally:
            if self._guard.story is not None:
                self._guard.settle()


@final
class Wrapping:
    """Turns connected sockets into channels, with the same limits and one pool of blocks.

    `share` makes the shared memory of a channel, where it is to have some. With `checksum` what
    they send has one over its tensors too.
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
        sock: Stream,
        remote: str,
        peer_names: tuple[str, ...] | None = None,
        binding: bytes = b"",
    ) -> SocketChannel:
        """The channel over a socket; the socket is the channel's from now on."""
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
    """A duration as the kernel reads it, never zero, which would mean for ever."""
    whole, fraction = divmod(min(max(seconds, 1e-6), 1e9), 1)
    return struct.pack("ll", int(whole), int(fraction * 1e6))
