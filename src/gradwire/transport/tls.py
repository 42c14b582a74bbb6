"""Frames over TLS 1.3 on TCP, between workers that show each other certificates.

The server sends one byte when it has accepted the certificate of the client, which otherwise would
not know: in TLS 1.3 the client's handshake completes before that. After this byte come frames.
close_notify is not sent: a frame has a length, so a truncated one is detected, and an attacker who
can forge the end of a connection can also break it.

One thread of a listener does the handshakes of all new connections concurrently. An unauthenticated
connection costs a socket and some memory for a few seconds at most, and never delays another.
Connections with a completed handshake are queued for `accept`.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, final

from gradwire import threads
from gradwire.errors import NotTrusted, PeerLost
from gradwire.options import Limits, Tls
from gradwire.threads import call_after_fork
from gradwire.transport.base import closed_here
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.sockets.channel import LIMITS, STALL, SocketChannel
from gradwire.transport.sockets.stream import connecting_to, reason_of, seconds_until
from gradwire.transport.tcp import connected, listening, tuned
from gradwire.transport.tls_session import URI_PREFIX, Identity, TlsSession, TlsStream, words_of

_log = logging.getLogger("gradwire")

_MAX_HANDSHAKE_BYTES: Final = 1 << 16
_MOST_READY: Final = 1024
_READ: Final = 1 << 14
_JOIN_SECONDS: Final = 5.0
_LONGEST_WAIT: Final = 3600.0
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_HANDSHAKE: Final = 0x16
_ACCEPTED: Final = b"w"
ONE_AUTHORITY = "all certificates of a job are signed by one authority, and valid on both clocks"


@final
class TlsTransport:
    """The transport for tls://host:port.

    A client must complete the handshake within `patience` seconds; the oldest of more than
    `limits.pending_handshakes` is dropped. `refused(kind, remote)` is called for each refused one,
    `refused_by` for one that refuses this worker.
    """

    def __init__(
        self,
        tls: Tls,
        *,
        limits: Limits = LIMITS,
        stall: float = STALL,
        patience: float = 5.0,
        refused: Callable[[str, str], None] = lambda kind, remote: None,
        refused_by: Callable[[str, str], None] = lambda kind, remote: None,
    ) -> None:
        self.identity, self._stall = Identity(tls), stall
        self.refused, self.refused_by = refused, refused_by
        self.names = self.identity.names  # of this worker, in its certificate
        self.patience, self.pending_handshakes = patience, limits.pending_handshakes
        self._socket_channel = partial(SocketChannel, limits=limits, stall=stall, pool=BlockPool())

    def listen(self, address: str) -> TlsListener:
        """Listen on the port, or on a free one for port 0; on loopback if no host is named."""
        return TlsListener(*listening(address, "tls"), self)

    def connect(self, address: str, deadline: float, name: str | None = None) -> SocketChannel:
        """Connect to the listener at the address, and check that it is the worker `name`."""
        sock = connected(address, "tls", deadline, self._stall)
        session = self.identity.session(accepts=False)
        try:
            _handshake(sock, session, address, deadline)
            names = session.peer_names()
            if name is not None and name not in names:
                raise NotTrusted(
                    f"{address} is not {name}: its certificate is for "
                    f"{', '.join(names) or 'no worker'}",
                    hint="the worker that listens there needs a certificate with the URI "
                    f"{URI_PREFIX}{name}",
                )
            return self.channel(sock, session, address)
        except BaseException:
            sock.close()
            raise

    def channel(
        self, sock: socket.socket, session: TlsSession, remote: str | None = None
    ) -> SocketChannel:
        """A channel over a completed handshake; `remote` is None at the end that accepted it."""
        return self._socket_channel(
            TlsStream(sock, session, self._stall),
            remote or tuned(sock, "tls", self._stall),
            peer_names=session.peer_names(),
            binding=self.identity.binding(session),
        )


def _handshake(sock: socket.socket, session: TlsSession, address: str, deadline: float) -> None:
    """Complete the handshake, and wait until the server accepts this worker."""
    with connecting_to(address, hint="it refused this worker, or does not use TLS: see its log"):
        try:
            while True:
                with suppress(ssl.SSLWantReadError):
                    session.tls.do_handshake()
                    if session.tls.read(1):
                        return
                sock.settimeout(seconds_until(deadline))
                if session.outgoing.pending:
                    sock.sendall(session.outgoing.read())
                received = sock.recv(_READ)
                if not received:
                    raise ConnectionResetError(errno.ECONNRESET, "it ended the TLS handshake")
                session.incoming.write(received)
        except ssl.SSLError as error:
            with suppress(OSError):  # an alert for the peer, if it can be sent without blocking
                sock.settimeout(0.0)
                sock.send(session.outgoing.read())
            raise _untrusted(address, error) from error


def _untrusted(address: str, error: ssl.SSLError) -> NotTrusted:
    words = words_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return NotTrusted(
            f"{address} is not trusted: its certificate is refused: {words}", hint=ONE_AUTHORITY
        )
    if _is_alert(words) and not words.endswith("version"):
        return NotTrusted(f"{address} does not trust this worker: {words}", hint=ONE_AUTHORITY)
    return NotTrusted(
        f"{address} does not speak TLS 1.3: {words}", hint="start every worker with Options(tls=…)"
    )


def _is_alert(words: str) -> bool:
    """Whether the peer has ended the handshake and said why."""
    return words.startswith("alert ")


class _Refused(Exception):
    """The reason why a connection is refused."""


@final
class _PendingHandshake:
    """A connection whose handshake is not complete."""

    def __init__(self, sock: socket.socket, session: TlsSession, deadline: float) -> None:
        self.sock, self.session, self.deadline = sock, session, deadline
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
            if is_over and not self.session.peer_names():
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
    """A listener for authenticated workers, with its thread."""

    def __init__(self, sock: socket.socket, address: str, transport: TlsTransport) -> None:
        self.address = address
        self._sock, self._transport = sock, transport
        self._pending: dict[_PendingHandshake, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._ready: SimpleQueue[SocketChannel | None] = SimpleQueue()  # None after the last
        self._stopped = threading.Event()
        self._close_reason: str | None = None
        sock.setblocking(False)
        call_after_fork(self)
        self._thread = threads.thread(f"gradwire {transport.names[0]} tls", self._work)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TlsListener on {self.address}: {self._close_reason or 'open'}>"

    def forked(self) -> None:
        """Close the copies of a forked process."""
        self._stopped.set()
        # They stay registered in the selector, which is shared with the parent.
        for sock in (self._sock, *(pending.sock for pending in tuple(self._pending))):
            sock.close()

    def accept(self) -> SocketChannel:
        """See `Listener.accept`."""
        channel = self._ready.get()
        if channel is not None and self._close_reason is None:
            return channel
        if channel is not None:
            channel.close("the listener was closed")
        self._ready.put(None)
        raise PeerLost(f"{self.address} was {self._close_reason}")

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening; see `Listener.close`. The thread closes what is left."""
        self._close_reason = self._close_reason or closed_here(reason)
        self._stopped.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._ready.put(None)
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
        with suppress(Empty):
            while True:
                if channel := self._ready.get_nowait():
                    channel.close("the listener was closed")
        self._ready.put(None)

    def _accept_one(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Without free descriptors the connection stays in the backlog until others are closed.
            if error.errno != errno.ECONNABORTED:
                self._stopped.wait(0.1)
            return
        try:
            session = self._transport.identity.session(accepts=True)
            deadline = time.monotonic() + self._transport.patience
            pending = _PendingHandshake(sock, session, deadline)
        except OSError:
            sock.close()
            return
        if len(self._pending) >= self._transport.pending_handshakes:
            self._refuse(next(iter(self._pending)), "was the oldest of too many pending handshakes")
        self._pending[pending] = None
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _continue(self, pending: _PendingHandshake) -> None:
        try:
            if not pending.advance():
                return
            self._forget(pending)
            channel = self._transport.channel(pending.sock, pending.session)
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
            if self._ready.qsize() < _MOST_READY:
                self._ready.put(channel)
            else:
                channel.close("too many connections wait to be accepted")

    def _refuse(self, pending: _PendingHandshake, why: str) -> None:
        self._forget(pending)
        pending.sock.close()
        told = self._transport.refused_by if _is_alert(why) else self._transport.refused
        told(why, f"tls://{pending.host}")

    def _forget(self, pending: _PendingHandshake) -> None:
        if self._pending.pop(pending, pending) is None:
            self._selector.unregister(pending.sock)
