"""A TLS 1.3 session between two workers: the names in their certificates, then a stream of bytes.

Both sides show a certificate; one authority of the job signs them all. A worker's name is the URI
`gradwire:NAME` among the certificate's alternative names. A DNS name could not hold every worker
name, is compared without regard to case, and the same authority may have issued it to a web server.

Not `ssl.SSLSocket`: it lets two threads use one OpenSSL object, which OpenSSL forbids, or blocks
one of them behind the other. Here OpenSSL works in memory only, under a lock that is held while it
computes and never during a wait for the network.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any, Final, NoReturn, final

from gradwire.errors import UsageError
from gradwire.ids import WORKER_NAME
from gradwire.options import Tls
from gradwire.transport.sockets.stream import INTERRUPTED, reason_of, stalled
from gradwire.wire.message import Buffer

URI_PREFIX: Final = "gradwire:"
_BINDING: Final = b"gradwire tls binding 1"
_FOR_OTHERS: Final = 0o077
_HINT = "`gradwire certs` makes certificates that fit together"
_READ: Final = 1 << 17
_CHUNK: Final = 1 << 16
_UNASKED_AT_MOST: Final = 1 << 16
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
_PATIENTLY: Final = int(socket.MSG_NOSIGNAL)


@final
class TlsSession:
    """The OpenSSL state of a connection, with memory buffers in place of a socket."""

    def __init__(self, context: ssl.SSLContext, *, accepts: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=accepts)

    def do_handshake(self) -> bool:
        """Continue the handshake with the received bytes; returns whether it is complete."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def peer_names(self) -> tuple[str, ...]:
        """The worker names in the peer's certificate, which the handshake has verified."""
        shown: dict[str, Any] = self.tls.getpeercert() or {}
        uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
        named = [uri.removeprefix(URI_PREFIX) for uri in uris if uri.startswith(URI_PREFIX)]
        return tuple(name for name in named if WORKER_NAME.fullmatch(name))

    def peer_certificate(self) -> bytes:
        """The certificate of the peer."""
        shown = self.tls.getpeercert(binary_form=True)
        assert shown is not None, "both sides must show a certificate"
        return shown


@final
class Identity:
    """The certificate and key of one worker, verified at startup as a peer would verify them."""

    def __init__(self, tls: Tls) -> None:
        _check_private(tls.key)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, tls)
        self._accepting.num_tickets = 0
        self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT, tls)
        myself = self._seen_by_itself(tls.certificate)
        self._certificate, self.names = myself.peer_certificate(), myself.peer_names()
        if not self.names:
            raise UsageError(
                f"the certificate {tls.certificate} names no worker",
                hint=f"the worker's name is a URI among the alternative names: {URI_PREFIX}NAME",
            )

    def session(self, *, accepts: bool) -> TlsSession:
        """A TLS session for one end of a new connection."""
        return TlsSession(self._accepting if accepts else self._dialling, accepts=accepts)

    def binding(self, session: TlsSession) -> bytes:
        """The channel binding: a digest of the certificates of client and server.

        It is equal at both ends unless a man in the middle uses its own certificate. TLS 1.3 does
        not define tls-unique, and Python's ssl does not offer tls-exporter.
        """
        ends = [self._certificate, session.peer_certificate()]
        if session.tls.server_side:
            ends.reverse()
        digest = hashlib.sha256(_BINDING)
        for certificate in ends:
            digest.update(len(certificate).to_bytes(4, "big") + certificate)
        return digest.digest()

    def _seen_by_itself(self, path: str) -> TlsSession:
        """The client session of a handshake of this worker with itself."""
        near, far = self.session(accepts=False), self.session(accepts=True)
        try:
            for here, there in 4 * ((near, far), (far, near)):  # two rounds would do
                here.do_handshake()
                there.incoming.write(here.outgoing.read())
        except ssl.SSLError as error:
            raise UsageError(
                f"no peer would accept the certificate {path}: {words_of(error)}", hint=_HINT
            ) from error
        return near


def _context(protocol: int, tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # the worker's name is checked, not the host's
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cafile=tls.authority)
    except OSError as error:
        raise _unusable("authority", tls.authority, error) from error
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except OSError as error:
        raise _unusable("certificate", f"{tls.certificate} with key {tls.key}", error) from error
    return context


def _no_password() -> NoReturn:
    raise UsageError("the key of the certificate needs a password", hint=_HINT)


def _unusable(what: str, where: str, error: OSError) -> UsageError:
    why = words_of(error) if isinstance(error, ssl.SSLError) else reason_of(error)
    return UsageError(f"cannot use the {what} {where}: {why}", hint=_HINT)


def _check_private(path: str) -> None:
    """Refuse a key file that others can read, or that belongs to another user."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unusable("key", path, error) from error
    # A key that Kubernetes mounts belongs to root, and to the group of the pod's user.
    may_group_read = found.st_uid == 0 and os.geteuid() != 0
    if found.st_mode & (_FOR_OTHERS & ~0o040 if may_group_read else _FOR_OTHERS):
        raise UsageError(f"the key {path} can be read by others", hint=f"chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise UsageError(f"the key {path} belongs to another user", hint="create your own key")


_REASON_LOST = 10
"""SSL_ERROR_INVALID_ERROR_CODE: OpenSSL says that the last operation was none that failed"""


@final
class TlsStream:
    """A socket with its session after the handshake, for one reader and one writer at a time.

    Bytes read from the kernel may be buffered here, where `poll` cannot see them. So a read looks
    here first, and raises BlockingIOError only if neither this buffer nor the kernel has a byte.
    """

    def __init__(self, sock: socket.socket, session: TlsSession, stall: float) -> None:
        self._sock, self._stall = sock, stall
        self._tls, self._incoming, self._outgoing = session.tls, session.incoming, session.outgoing
        self._read: Any = session.tls.read  # given a buffer, it returns a count
        self._computing = threading.RLock()  # reentrant, as a finalizer may send
        self._is_dry = False
        self._broken: str | None = None
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)
        self.fileno, self.setblocking = sock.fileno, sock.setblocking
        self.setsockopt: Any = sock.setsockopt
        self.shutdown, self.close = sock.shutdown, sock.close

    # --- one reader at a time ---

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """Read what is buffered, or what comes next; see `socket.recv_into`.

        hot: benchmarks of round trips and of bandwidth
        """
        while True:
            if self._is_dry:
                # Set again only if nothing came: an interrupt may come after bytes were fed.
                self._is_dry = False
                # From the kernel to OpenSSL in one step, so that a Ctrl-C loses no byte.
                received = map(self._sock.recv, (_READ,), (flags & _AT_ONCE,))
                try:
                    if not next(map(self._incoming.write, received)):
                        return 0
                except BlockingIOError:
                    self._is_dry = True
                    raise
            count = self._decrypted(buffer)
            if count is not None:
                return count

    def _decrypted(self, target: memoryview) -> int | None:
        """Decrypt the buffered records into `target`; None if there are none, 0 at the end."""
        self._check()
        at_stake = 0
        try:
            with self._computing:
                at_stake = self._incoming.pending + self._tls.pending()
                count = self._fill(target)
                if self._outgoing.pending > _UNASKED_AT_MOST:
                    raise OSError(errno.EPROTO, self._break("tls: too many key updates"))
        except OSError:
            raise
        except BaseException:
            if at_stake:  # some bytes may be lost
                self._break(INTERRUPTED)
            raise
        return count

    def _fill(self, target: memoryview) -> int | None:
        """Decrypt, with the lock held. Bytes before an error are still returned."""
        filled, wanted = 0, len(target)
        try:
            while filled < wanted:
                try:
                    count: int = self._read(wanted - filled, target[filled:])
                except ssl.SSLError as error:
                    # Python runs signal handlers between the read of OpenSSL and the question why
                    # it failed. If a handler has used this session, the reason is lost: ask again.
                    if error.errno != _REASON_LOST:
                        raise
                    continue
                if not count:
                    return filled
                filled += count
        except ssl.SSLWantReadError:
            self._is_dry = True
        except ssl.SSLError as error:
            reason = self._break(f"tls: {words_of(error)}")
            if not filled:
                raise OSError(errno.EPROTO, reason) from error
        return filled or None

    # --- one writer at a time ---

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        """See `socket.send`."""
        return self._encrypt(memoryview(data)[:_CHUNK], flags)

    def sendmsg(self, buffers: Iterable[Buffer], beside: object = (), flags: int = 0, /) -> int:
        """See `socket.sendmsg`; small buffers are joined into one chunk first."""
        parts, length = [], 0
        for part in buffers:
            view = memoryview(part)[: _CHUNK - length]
            parts.append(view)
            length += len(view)
            if length == _CHUNK:
                break
        return self._encrypt(parts[0] if len(parts) == 1 else b"".join(parts), flags)

    def _encrypt(self, chunk: Buffer, flags: int) -> int:
        """Encrypt and send a chunk. Once encrypted it must be sent, or the connection ends."""
        self._check()
        if flags & _AT_ONCE and not self._room.poll(0):
            raise BlockingIOError(errno.EAGAIN, "no room")
        try:
            with self._computing:
                count = self._tls.write(chunk)
                unsent = memoryview(self._outgoing.read())
        except ssl.SSLError as error:
            raise OSError(errno.EPROTO, self._break(f"tls: {words_of(error)}")) from error
        while unsent:
            try:
                unsent = unsent[self._sock.send(unsent, _PATIENTLY) :]
            except BlockingIOError:
                reason = self._break(stalled(self._stall))
                raise TimeoutError(errno.ETIMEDOUT, reason) from None
        return count

    def _check(self) -> None:
        if self._broken is not None:
            raise OSError(errno.EPROTO, self._broken)

    def _break(self, reason: str) -> str:
        self._broken = self._broken or reason
        return self._broken


def words_of(error: ssl.SSLError) -> str:
    """The reason of an OpenSSL error, without its source location."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    reason = error.reason or "connection ended"
    for prefix in ("SSLV3_", "TLSV1_", "TLSV13_"):
        reason = reason.removeprefix(prefix)
    return reason.replace("_", " ").lower()
