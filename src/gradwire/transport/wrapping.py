"""What every channel of one transport over sockets has in common."""

from __future__ import annotations

import socket
from typing import final

from gradwire.options import Limits, Timeouts
from gradwire.transport.blocks import BlockPool
from gradwire.transport.sockets import SocketChannel


@final
class Wrapping:
    """Turns connected sockets into channels, with the same limits and one pool of blocks."""

    def __init__(self, limits: Limits | None, stall: float | None, pool: BlockPool | None) -> None:
        self._limits = limits or Limits()
        self._pool = pool or BlockPool()
        self.stall = Timeouts().stall if stall is None else stall

    def channel(self, sock: socket.socket, remote: str) -> SocketChannel:
        """The channel over a socket; the socket is the channel's from now on."""
        return SocketChannel(sock, remote, limits=self._limits, stall=self.stall, pool=self._pool)
