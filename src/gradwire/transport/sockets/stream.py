"""What a channel asks of the connected stream below it: a part of what a socket can do.

The stream blocks, with kernel timeouts; MSG_DONTWAIT asks for one step that does not. Where nothing
can be read or written in time it raises BlockingIOError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

from gradwire.wire.frame import Buffer

Beside: TypeAlias = Iterable[tuple[int, int, Buffer]]


class Stream(Protocol):
    """A connected socket, or what stands for one."""

    def fileno(self) -> int:
        """What `poll` waits on, once a read or write has raised BlockingIOError."""

    def recv(self, length: int, flags: int = 0, /) -> bytes:
        """At most so many bytes; none at the end."""

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """Bytes that were read; 0 at the end."""

    def recvmsg_into(
        self, buffers: Iterable[memoryview], room: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """The same, with what comes beside the bytes; for unix sockets."""

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        """Bytes that were taken."""

    def sendmsg(self, buffers: Iterable[Buffer], beside: Beside = (), flags: int = 0, /) -> int:
        """Bytes that were taken, of all the buffers together."""

    def setblocking(self, flag: bool, /) -> None:
        """True, from the channel."""

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """The timeouts, from the channel."""

    def shutdown(self, how: int, /) -> None:
        """Wake everyone who is blocked here."""

    def close(self) -> None:
        """Give the descriptor back."""
