"""The certificate of a worker, and the verification of those of its peers.

Only TLS 1.3; both sides show a certificate; one authority of the job signs them all. A worker's
name is the URI `gradwire:NAME` among the certificate's alternative names. A DNS name could not hold
every worker name, is compared without regard to case, and the same authority may have issued it to
a web server.
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
from typing import Any, Final, NoReturn, final

from gradwire.errors import UsageError
from gradwire.options import Tls
from gradwire.transport.sockets.stream import reason_of
from gradwire.transport.tls.stream import TlsSession, words_of

URI_PREFIX: Final = "gradwire:"
_NAME: Final = re.compile(r"[A-Za-z0-9_:-]{1,127}")
_BINDING: Final = b"gradwire tls binding 1"
_FOR_OTHERS: Final = 0o077
_HINT = "`gradwire certs` makes certificates that fit together"


@final
class Identity:
    """The certificate and key of one worker, verified at startup as a peer would verify them."""

    def __init__(self, tls: Tls) -> None:
        _check_private(tls.key)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, tls)
        self._accepting.num_tickets = 0
        self._dialling = _context(ssl.PROTOCOL_TLS_CLIENT, tls)
        myself = self._seen_by_itself(tls.certificate)
        self._certificate = _certificate_of(myself)
        self.names = worker_names_of(myself)
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
        ends = [self._certificate, _certificate_of(session)]
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
            for _ in range(8):
                done = [near.do_handshake()]
                far.incoming.write(near.outgoing.read())
                done.append(far.do_handshake())
                near.incoming.write(far.outgoing.read())
                if all(done):
                    return near
        except ssl.SSLError as error:
            raise UsageError(
                f"no peer would accept the certificate {path}: {words_of(error)}", hint=_HINT
            ) from error
        raise AssertionError("a handshake with itself takes two rounds")


def worker_names_of(session: TlsSession) -> tuple[str, ...]:
    """The worker names in the peer's certificate, which the handshake has verified."""
    shown: dict[str, Any] = session.tls.getpeercert() or {}
    uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    named = [uri.removeprefix(URI_PREFIX) for uri in uris if uri.startswith(URI_PREFIX)]
    return tuple(name for name in named if _NAME.fullmatch(name))


def _certificate_of(session: TlsSession) -> bytes:
    shown = session.tls.getpeercert(binary_form=True)
    assert shown is not None, "both sides must show a certificate"
    return shown


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
    if found.st_mode & _FOR_OTHERS:
        raise UsageError(f"the key {path} can be read by others", hint=f"chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise UsageError(f"the key {path} belongs to another user", hint="create your own key")
