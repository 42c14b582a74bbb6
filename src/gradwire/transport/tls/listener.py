"""The TLS listener: one thread does the handshakes of all new connections concurrently.

An unauthenticated connection costs a socket and some memory for a few seconds at most, and never
delays another. Connections with a completed handshake are queued for `accept`.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

from gradwire import threads
from gradwire.errors import PeerLost
from gradwire.threads import call_after_fork
from gradwire.transport.base import closed_here
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.sockets.stream import reason_of
from gradwire.transport.tls.identity import worker_names_of
from gradwire.transport.tls.stream import TlsSession, words_of

_log = logging.getLogger("gradwire")

HANDSHAKE_SECONDS: Final = 5.0
MAX_PENDING_HANDSHAKES: Final = 256
_MOST_READY: Final = 1024
_MAX_HANDSHAKE_BYTES: Final = 1 << 16
_READ: Final = 1 << 14
_JOIN_SECONDS: Final = 5.0
_LONGEST_WAIT: Final = 3600.0
_PAUSE_SECONDS: Final = 0.1
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_HANDSHAKE: Final = 0x16
_ACCEPTED: Final = b"w"


class _Refused(Exception):
    """The reason why a connection is refused."""


@final
class _PendingHandshake:
    """A connection whose handshake is not complete."""

    __slots__ = ("deadline", "host", "received", "session", "sock")

    def __init__(self, sock: socket.socket, session: TlsSession, limit: float) -> None:
        self.sock, self.session, self.deadline = sock, session, limit
        self.received = 0
        self.host = str(sock.getpeername()[0])
        sock.setblocking(False)

    def advance(self) -> bool:
        """Read and answer; returns whether the handshake is complete. Raises _Refused."""
        received = self.sock.recv(_READ)
        if not received:
            raise _Refused("left during the handshake")
        if not self.received and received[0] != _HANDSHAKE:
            raise _Refused("does not speak TLS")
        self.received += len(received)
        if self.received > _MAX_HANDSHAKE_BYTES:
            raise _Refused("sent too much during the handshake")
        self.session.incoming.write(received)
        try:
            is_over = self.session.do_handshake()
            if is_over and not worker_names_of(self.session):
                raise _Refused("has a certificate that names no worker")
            if is_over:
                self.session.tls.write(_ACCEPTED)
        except ssl.SSLError as error:
            raise _Refused(words_of(error)) from error
        finally:
            # The answer fits into any socket buffer, unless the peer does not read.
            answer = self.session.outgoing.read()
            if answer and self.sock.send(answer, _AT_ONCE) != len(answer):
                raise _Refused("does not read during the handshake")
        return is_over


@final
class TlsListener:
    """A listener for authenticated workers, with its thread; see `Listener`.

    `session` begins the TLS session of a new connection, `wrap` makes a channel from an
    authenticated one, and `on_refused(why, remote)` is called for each other connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        worker: str,
        session: Callable[[], TlsSession],
        wrap: Callable[[socket.socket, TlsSession], SocketChannel],
        patience: float,
        pending_handshakes: int,
        on_refused: Callable[[str, str], None],
    ) -> None:
        self.address = address
        self._sock, self._session, self._wrap = sock, session, wrap
        self._patience, self._pending_handshakes = patience, pending_handshakes
        self._on_refused = on_refused
        self._pending: dict[_PendingHandshake, None] = {}
        """the oldest first"""
        self._selector = selectors.DefaultSelector()
        self._ready: deque[SocketChannel] = deque()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._close_reason: str | None = None
        sock.setblocking(False)
        call_after_fork(self)
        self._thread = threads.thread(f"gradwire {worker} tls", self._work)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TlsListener on {self.address}: {self._close_reason or 'open'}>"

    def forked(self) -> None:
        """Close the copies of a forked process.

        The sockets stay registered in the selector, which is shared with the parent.
        """
        self._stopped.set()
        for sock in (self._sock, *(pending.sock for pending in tuple(self._pending))):
            sock.close()

    def accept(self) -> SocketChannel:
        """Block for the next authenticated connection; see `Listener.accept`."""
        with self._changed:
            while not self._ready and self._close_reason is None:
                self._changed.wait(_LONGEST_WAIT)
            if self._close_reason is not None:
                raise PeerLost(f"{self.address} was {self._close_reason}")
            return self._ready.popleft()

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening; see `Listener.close`."""
        with self._changed:
            if self._close_reason is None:
                self._close_reason = closed_here(reason)
            unwanted, self._ready = self._ready, deque()
            self._changed.notify_all()
        self._stopped.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for channel in unwanted:
            channel.close(reason)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # --- on the thread ---

    def _work(self) -> None:
        self._selector.register(self._sock, selectors.EVENT_READ)
        while not self._stopped.is_set():
            oldest = next(iter(self._pending), None)
            left = max(0.0, oldest.deadline - time.monotonic()) if oldest else _LONGEST_WAIT
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept_one()
                elif key.data in self._pending:  # else an earlier event has dropped it
                    self._continue(key.data)
            now = time.monotonic()
            for pending in [pending for pending in self._pending if pending.deadline <= now]:
                self._refuse(pending, "took too long for the handshake")
        for pending in tuple(self._pending):
            self._forget(pending)
            pending.sock.close()
        self._selector.close()
        self._sock.close()

    def _accept_one(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Without free descriptors the connection stays in the backlog until others are closed.
            if error.errno != errno.ECONNABORTED:
                self._stopped.wait(_PAUSE_SECONDS)
            return
        try:
            pending = _PendingHandshake(sock, self._session(), time.monotonic() + self._patience)
        except OSError:
            sock.close()
            return
        if len(self._pending) >= self._pending_handshakes:
            self._refuse(next(iter(self._pending)), "was the oldest of too many pending handshakes")
        self._pending[pending] = None
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _continue(self, pending: _PendingHandshake) -> None:
        try:
            if not pending.advance():
                return
            self._forget(pending)
            channel = self._wrap(pending.sock, pending.session)
        except BlockingIOError:
            return
        except _Refused as refusal:
            self._refuse(pending, str(refusal))
        except OSError as error:
            self._refuse(pending, reason_of(error))
        except Exception as error:  # a bug here must not stop other connections
            _log.exception("the TLS handshake with %s failed", pending.host)
            self._refuse(pending, type(error).__name__)
        else:
            with self._changed:
                has_room = self._close_reason is None and len(self._ready) < _MOST_READY
                if has_room:
                    self._ready.append(channel)
                    self._changed.notify()
            if not has_room:
                channel.close("too many connections wait to be accepted")

    def _refuse(self, pending: _PendingHandshake, why: str) -> None:
        self._forget(pending)
        pending.sock.close()
        self._on_refused(why, f"tls://{pending.host}")

    def _forget(self, pending: _PendingHandshake) -> None:
        if self._pending.pop(pending, pending) is None:
            self._selector.unregister(pending.sock)
