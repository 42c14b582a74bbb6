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
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
_MOST_LOGGED: Final = 1024
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
            self._answer()
        return is_over

    def _answer(self) -> None:
        """Send the answer. It fits into any socket buffer, unless the peer does not read."""
        said = self.session.outgoing.read()
        if said and self.sock.send(said, _AT_ONCE) != len(said):
            raise _Refused("does not read during the handshake")


@final
class TlsAcceptor:
    """Accepts and authenticates connections, on one thread. Owns the listening socket.

    `wrap` makes a channel from an authenticated connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: Callable[[], TlsSession],
        wrap: Callable[[socket.socket, TlsSession], SocketChannel],
        patience: float,
        pending_handshakes: int,
        refused: Callable[[str, str], None] | None = None,
    ) -> None:
        self._sock, self._session, self._wrap = sock, session, wrap
        self._patience, self._pending_handshakes = patience, pending_handshakes
        self._on_refused = refused or self._log_once
        self._pending: dict[_PendingHandshake, None] = {}
        self._selector = selectors.DefaultSelector()
        self._stopped = threading.Event()
        self._logged: set[tuple[str, str]] = set()
        self.refused: Counter[str] = Counter()
        """The number of refused connections by reason."""
        sock.setblocking(False)
        call_after_fork(self)

    def forked(self) -> None:
        """Close the copies of a forked process.

        The sockets stay registered in the selector, which is shared with the parent.
        """
        self._stopped.set()
        for sock in (self._sock, *(pending.sock for pending in tuple(self._pending))):
            sock.close()

    def work(self, admit: Callable[[SocketChannel], bool]) -> None:
        """Run until `stop`. `admit` queues a new channel, or returns False if the queue is full."""
        self._selector.register(self._sock, selectors.EVENT_READ)
        while not self._stopped.is_set():
            for key, _ in self._selector.select(self._until_next_deadline()):
                if key.data is None:
                    self._accept_one()
                else:
                    self._continue(key.data, admit)
            self._refuse_overdue()
        for pending in tuple(self._pending):
            self._drop(pending)
        self._selector.close()
        self._sock.close()

    def stop(self) -> None:
        """Accept no more connections, and end `work`; from any thread."""
        self._stopped.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

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

    def _continue(self, pending: _PendingHandshake, admit: Callable[[SocketChannel], bool]) -> None:
        if pending not in self._pending:
            return  # dropped by an earlier event of the same select
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
            if not admit(channel):
                channel.close("too many connections wait to be accepted")

    def _until_next_deadline(self) -> float:
        if not self._pending:
            return _LONGEST_WAIT
        return max(0.0, next(iter(self._pending)).deadline - time.monotonic())

    def _refuse_overdue(self) -> None:
        now = time.monotonic()
        for pending in tuple(self._pending):
            if pending.deadline > now:
                return
            self._refuse(pending, "took too long for the handshake")

    def _refuse(self, pending: _PendingHandshake, why: str) -> None:
        self.refused[why] += 1
        self._drop(pending)
        self._on_refused(why, f"tls://{pending.host}")

    def _log_once(self, why: str, remote: str) -> None:
        if (remote, why) not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add((remote, why))
            _log.warning("refused %s: %s", remote, why)

    def _drop(self, pending: _PendingHandshake) -> None:
        self._forget(pending)
        pending.sock.close()

    def _forget(self, pending: _PendingHandshake) -> None:
        if self._pending.pop(pending, pending) is None:
            self._selector.unregister(pending.sock)


@final
class TlsListener:
    """A listener for authenticated workers; see `Listener`."""

    def __init__(self, acceptor: TlsAcceptor, address: str, worker: str) -> None:
        self.address = address
        self._acceptor = acceptor
        self._ready: deque[SocketChannel] = deque()
        self._changed = threading.Condition()
        self._close_reason: str | None = None
        self._thread = threads.thread(
            f"gradwire {worker} tls", partial(self._acceptor.work, self._admit)
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TlsListener on {self.address}: {self._close_reason or 'open'}>"

    @property
    def refused(self) -> Counter[str]:
        """The number of refused connections by reason."""
        return Counter(self._acceptor.refused)

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
        self._acceptor.stop()
        for channel in unwanted:
            channel.close(reason)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _admit(self, channel: SocketChannel) -> bool:
        with self._changed:
            has_room = self._close_reason is None and len(self._ready) < _MOST_READY
            if has_room:
                self._ready.append(channel)
                self._changed.notify()
        return has_room
