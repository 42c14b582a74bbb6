"""Frames over TLS 1.3 on TCP, between workers that show each other certificates.

The server sends one byte when it has accepted the certificate of the client, which otherwise would
not know: in TLS 1.3 the client's handshake completes before that. After this byte come frames.
close_notify is not sent: a frame has a length, so a truncated one is detected, and an attacker who
can forge the end of a connection can also break it.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from gradwire.errors import NotTrusted
from gradwire.options import Limits, Tls
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.sockets.channel import LIMITS, STALL, SocketChannel
from gradwire.transport.sockets.stream import connecting_to, seconds_until
from gradwire.transport.tcp import connected, listening, tuned
from gradwire.transport.tls.identity import URI_PREFIX, Identity, worker_names_of
from gradwire.transport.tls.listener import (
    HANDSHAKE_SECONDS,
    MAX_PENDING_HANDSHAKES,
    TlsListener,
)
from gradwire.transport.tls.stream import TlsSession, TlsStream, words_of

_READ = 1 << 14
_ONE_AUTHORITY = "all certificates of a job are signed by one authority, and valid on both clocks"


@final
class TlsTransport:
    """The transport for tls://host:port.

    A client must complete the handshake within `patience` seconds. With more than
    `pending_handshakes`, the oldest is dropped. `refused(kind, remote)` is called for each refused
    client.
    """

    def __init__(
        self,
        tls: Tls,
        *,
        limits: Limits = LIMITS,
        stall: float = STALL,
        patience: float = HANDSHAKE_SECONDS,
        pending_handshakes: int = MAX_PENDING_HANDSHAKES,
        refused: Callable[[str, str], None] = lambda kind, remote: None,
    ) -> None:
        self._identity = Identity(tls)
        self._stall = stall
        self._socket_channel = partial(SocketChannel, limits=limits, stall=stall, pool=BlockPool())
        self._patience, self._pending_handshakes = patience, pending_handshakes
        self._refused = refused

    @property
    def names(self) -> tuple[str, ...]:
        """The worker names in the certificate of this worker."""
        return self._identity.names

    def listen(self, address: str) -> TlsListener:
        """Listen on the port, or on a free one for port 0; on loopback if no host is named."""
        sock, bound = listening(address, "tls")
        return TlsListener(
            sock,
            bound,
            self.names[0],
            lambda: self._identity.session(accepts=True),
            self._accepted,
            self._patience,
            self._pending_handshakes,
            self._refused,
        )

    def connect(self, address: str, deadline: float, name: str | None = None) -> SocketChannel:
        """Connect to the listener at the address, and check that it is the worker `name`."""
        sock = connected(address, "tls", deadline, self._stall)
        session = self._identity.session(accepts=False)
        try:
            _handshake(sock, session, address, deadline)
            names = worker_names_of(session)
            if name is not None and name not in names:
                raise NotTrusted(
                    f"{address} is not {name}: its certificate is for "
                    f"{', '.join(names) or 'no worker'}",
                    hint="the worker that listens there needs a certificate with the URI "
                    f"{URI_PREFIX}{name}",
                )
            return self._channel(sock, session, address, accepts=False)
        except BaseException:
            sock.close()
            raise

    def _accepted(self, sock: socket.socket, session: TlsSession) -> SocketChannel:
        """A channel for a client that has completed its handshake."""
        remote = tuned(sock, "tls", self._stall)
        return self._channel(sock, session, remote, accepts=True)

    def _channel(
        self, sock: socket.socket, session: TlsSession, remote: str, *, accepts: bool
    ) -> SocketChannel:
        return self._socket_channel(
            TlsStream(sock, session, self._stall),
            remote,
            peer_names=worker_names_of(session),
            binding=self._identity.binding(session, accepts=accepts),
        )


def _handshake(sock: socket.socket, session: TlsSession, address: str, deadline: float) -> None:
    """Complete the handshake, and wait until the server accepts this worker."""
    with connecting_to(address, hint="it refused this worker, or does not use TLS: see its log"):
        try:
            while not session.do_handshake():
                _exchange(sock, session, deadline)
            while not _is_accepted(session):
                _exchange(sock, session, deadline)
        except ssl.SSLError as error:
            with suppress(OSError):  # an alert for the peer, if it can be sent without blocking
                sock.settimeout(0.0)
                sock.send(session.outgoing.read())
            raise _untrusted(address, error) from error


def _is_accepted(session: TlsSession) -> bool:
    try:
        if session.tls.read(1):
            return True
    except ssl.SSLWantReadError:
        return False
    raise _ended()


def _exchange(sock: socket.socket, session: TlsSession, deadline: float) -> None:
    """Send what OpenSSL has to send, and receive an answer."""
    sock.settimeout(seconds_until(deadline))
    if session.outgoing.pending:
        sock.sendall(session.outgoing.read())
    received = sock.recv(_READ)
    if not received:
        raise _ended()
    session.incoming.write(received)


def _ended() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "it ended the TLS handshake")


def _untrusted(address: str, error: ssl.SSLError) -> NotTrusted:
    words = words_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return NotTrusted(
            f"{address} is not trusted: its certificate is refused: {words}", hint=_ONE_AUTHORITY
        )
    if words.startswith("alert ") and not words.endswith("version"):
        return NotTrusted(f"{address} does not trust this worker: {words}", hint=_ONE_AUTHORITY)
    return NotTrusted(
        f"{address} does not speak TLS 1.3: {words}", hint="start every worker with Options(tls=…)"
    )
