"""Frames over TLS 1.3 on TCP, between workers that show each other certificates.

The one who accepts says one byte when it has accepted the certificate of the one who dials, who
otherwise would not know: in TLS 1.3 its own handshake is over before that. After it come frames.
Nobody says goodbye (close_notify): a frame knows its length, so that none can be cut short unseen,
and whoever can forge the end of a connection can also break it.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

from gradwire.errors import DeadlinePassed, NotTrusted, PeerLost
from gradwire.options import Limits, Tls
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.sockets.channel import SocketChannel, Wrapping
from gradwire.transport.sockets.stream import reason_of
from gradwire.transport.tcp import connected, listening, tuned
from gradwire.transport.tls.identity import URI_PREFIX, Identity, names_of
from gradwire.transport.tls.listener import (
    MOST_STRANGERS,
    PATIENCE_SECONDS,
    TlsAcceptor,
    TlsListener,
)
from gradwire.transport.tls.stream import Session, TlsStream, words_of

_READ = 1 << 14
_ONE_AUTHORITY = "all certificates of a job are signed by one authority, and valid on both clocks"
_LONGEST_WAIT = 86400.0


@final
class TlsTransport:
    """tls://host:port

    Who connects has `patience` seconds to prove who it is; of those who have not yet, the oldest
    goes when there are more than `pending_handshakes`. `refused(kind, remote)` hears of each that
    was sent away; without it, that is logged once for each kind and host.
    """

    def __init__(
        self,
        tls: Tls,
        *,
        limits: Limits | None = None,
        stall: float | None = None,
        pool: BlockPool | None = None,
        patience: float = PATIENCE_SECONDS,
        pending_handshakes: int = MOST_STRANGERS,
        refused: Callable[[str, str], None] | None = None,
    ) -> None:
        self._identity = Identity(tls)
        self._wrapping = Wrapping(limits, stall, pool)
        self._patience, self._pending_handshakes = patience, pending_handshakes
        self._refused = refused

    @property
    def names(self) -> tuple[str, ...]:
        """The workers that our own certificate is for."""
        return self._identity.names

    def listen(self, address: str) -> TlsListener:
        """Take the port, or a free one for port 0; only this host can reach us if none is named."""
        sock, bound = listening(address, "tls")
        acceptor = TlsAcceptor(
            sock,
            lambda: self._identity.session(accepts=True),
            self._accepted,
            self._patience,
            self._pending_handshakes,
            self._refused,
        )
        return TlsListener(acceptor, bound, self.names[0])

    def connect(self, address: str, deadline: float, name: str | None = None) -> SocketChannel:
        """Reach whoever listens there, if it is the worker of that name."""
        sock = connected(address, "tls", deadline, self._wrapping.stall)
        session = self._identity.session(accepts=False)
        try:
            _introduce(sock, session, address, deadline)
            names = names_of(session)
            if name is not None and name not in names:
                raise _is_another(address, names, name)
            return self._channel(sock, session, address, accepts=False)
        except BaseException:
            sock.close()
            raise

    def _accepted(self, sock: socket.socket, session: Session) -> SocketChannel:
        """What the doorman has let in."""
        remote = tuned(sock, "tls", self._wrapping.stall)
        return self._channel(sock, session, remote, accepts=True)

    def _channel(
        self, sock: socket.socket, session: Session, remote: str, *, accepts: bool
    ) -> SocketChannel:
        return self._wrapping.channel(
            TlsStream(sock, session, self._wrapping.stall),
            remote,
            names_of(session),
            self._identity.binding(session, accepts=accepts),
        )


def _introduce(sock: socket.socket, session: Session, address: str, deadline: float) -> None:
    """Shake hands, and hear that we are welcome."""
    try:
        while not session.shake_hands():
            _exchange(sock, session, deadline)
        while not _is_welcome(session):
            _exchange(sock, session, deadline)
    except ssl.SSLError as error:
        _say_why(sock, session)
        raise _untrusted(address, error) from error
    except TimeoutError as error:
        raise DeadlinePassed(f"{address} did not answer before the deadline") from error
    except OSError as error:
        raise PeerLost(
            f"cannot reach {address}: {reason_of(error)}",
            hint="it refused this worker, or does not speak TLS: its log says which",
        ) from error


def _is_welcome(session: Session) -> bool:
    try:
        if session.tls.read(1):
            return True
    except ssl.SSLWantReadError:
        return False
    raise _ended()


def _exchange(sock: socket.socket, session: Session, deadline: float) -> None:
    """Say what there is to say, and hear what comes."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(min(left, _LONGEST_WAIT))
    if session.outgoing.pending:
        sock.sendall(session.outgoing.read())
    heard = sock.recv(_READ)
    if not heard:
        raise _ended()
    session.incoming.write(heard)


def _ended() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "it ended the TLS handshake")


def _say_why(sock: socket.socket, session: Session) -> None:
    """The alert that OpenSSL has for the peer, if it goes at once."""
    with suppress(OSError):
        sock.settimeout(0.0)
        sock.send(session.outgoing.read())


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


def _is_another(address: str, names: tuple[str, ...], name: str) -> NotTrusted:
    said = ", ".join(names) or "no worker"
    return NotTrusted(
        f"{address} is not {name}: its certificate is for {said}",
        hint=f"who listens there needs a certificate with the URI {URI_PREFIX}{name}",
    )
