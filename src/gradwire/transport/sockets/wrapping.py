"""What every channel of one transport over sockets has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from gradwire.options import Limits, Timeouts
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import SharedMemory
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.sockets.stream import Stream


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
