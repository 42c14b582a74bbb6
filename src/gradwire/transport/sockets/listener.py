"""Listening on a stream socket of any family; shared by unix, tcp and tls."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from typing import final

from gradwire.errors import PeerLost
from gradwire.transport.base import closed_here
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.sockets.stream import SocketCloser

_BACKLOG = 1024
_OUT_OF_HANDLES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def listening_socket(family: int, place: str | tuple[object, ...]) -> socket.socket:
    """A socket that listens at a place of its family; OSError if that is not possible."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        if isinstance(place, str):
            # No peer can connect before `listen`, so the mode is never too wide.
            os.chmod(place, 0o600)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


@final
class SocketListener:
    """A listening socket, which it owns.

    `wrap` makes a channel from an accepted socket, or None to refuse it; `on_close` runs once.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        wrap: Callable[[socket.socket], SocketChannel | None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._sock = sock
        self._wrap = wrap
        self._on_close = on_close
        self._closer = SocketCloser(sock)
        self._closed = threading.Event()
        sock.setblocking(True)

    def __repr__(self) -> str:
        return f"<SocketListener on {self.address}: {self._closer.close_reason or 'open'}>"

    def accept(self) -> SocketChannel:
        """Block for the next connection; see `Listener.accept`."""
        with self._closer.receiving:
            channel = None
            while channel is None and self._closer.close_reason is None:
                channel = self._maybe_accept()
        if self._closer.close_reason is not None:
            self._closer.close_if_unused()
        if channel is None:
            raise PeerLost(f"{self.address} was {self._closer.close_reason}")
        return channel

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening; see `Listener.close`."""
        if self._closer.end(closed_here(reason)):
            self._closed.set()
            self._on_close()

    def _maybe_accept(self) -> SocketChannel | None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            # The peer may have left again. Without free descriptors the connection stays in the
            # backlog until others are closed.
            if error.errno in _OUT_OF_HANDLES:
                self._closed.wait(0.1)
            return None
        try:
            return self._wrap(sock)
        except OSError:
            sock.close()
            return None
