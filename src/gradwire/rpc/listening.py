"""Where a worker of its own process listens, and by what means it reaches the others."""

from __future__ import annotations

import logging
import socket

from gradwire.agent.peers.refusals import Refusals
from gradwire.errors import UsageError
from gradwire.options import Options, rendezvous_host, tls_from_environment
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener, Transport
from gradwire.transport.shared_memory import SHARED_AT_MOST
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.tls.transport import TlsTransport
from gradwire.transport.unix import UnixTransport

_HINTS = {
    "tcp": "this worker has a certificate and speaks TLS: start the other one with tls=… too",
    "tls": "this worker has no certificate: start it with Options(tls=Tls(…)) or GRADWIRE_TLS_CERT",
}
_LOOPBACK = {"localhost", "127.0.0.1", "::1", ""}
_log = logging.getLogger("gradwire")


def transports_for(options: Options, name: str, refusals: Refusals | None = None) -> Transports:
    """All by which the worker of that name can reach another process.

    Plain TCP goes beyond this machine only if asked for. One that has a certificate never speaks
    it: who it looks up in the rendezvous could be anywhere.
    """
    tls = options.tls or tls_from_environment()
    stall, limits, checksum = options.timeouts.stall, options.limits, options.checksum
    shared_bytes = SHARED_AT_MOST if options.shared_memory else 0
    counted = refusals or Refusals()

    def refused(kind: str, remote: str) -> None:
        if counted.count(kind, remote):
            _log.warning("refused %s: %s", remote, kind)

    known: dict[str, Transport] = {
        "unix": UnixTransport(
            stall=stall,
            limits=limits,
            shared_bytes=shared_bytes,
            checksum=checksum,
            refused=refused,
        )
    }
    if tls is None:
        near = not options.insecure
        known["tcp"] = TcpTransport(
            stall=stall, limits=limits, checksum=checksum, this_host_only=near
        )
    else:
        known["tls"] = over_tls = TlsTransport(
            tls,
            stall=stall,
            limits=limits,
            patience=options.timeouts.handshake,
            pending_handshakes=limits.pending_handshakes,
            refused=refused,
        )
        _check_own_name(over_tls, name)
    return Transports(known, _HINTS)


def listen(transports: Transports, options: Options) -> Listener:
    """Open the listener that `options.listen` asks for.

    Workers that meet on this machine speak over a unix socket. If they meet elsewhere, peers reach
    us at the address from which this machine would speak to the meeting place.
    """
    if options.insecure:
        _log.warning(
            "insecure=True: workers may speak beyond this machine without TLS, and whoever can see "
            "the traffic can read and change it"
        )
    if options.listen == "unix":
        return transports.listen("unix://")
    if options.listen != "auto":
        return transports.listen(_secured(transports, options.listen))
    host = rendezvous_host(options.init_method)
    if host in _LOOPBACK:
        return transports.listen("unix://")
    return transports.listen(_secured(transports, f"tcp://{_address_towards(host)}:0"))


def _secured(transports: Transports, address: str) -> str:
    """The same place over TLS, where this worker has a certificate."""
    scheme, _, place = address.partition("://")
    is_secured = scheme == "tcp" and "tls" in transports.schemes
    return f"tls://{place}" if is_secured else address


def _check_own_name(transport: TlsTransport, name: str) -> None:
    if name not in transport.names:
        raise UsageError(
            f"{name} has a certificate for {', '.join(transport.names)}",
            hint=f"`gradwire certs --workers {name}` makes one for it",
        )


def _address_towards(host: str) -> str:
    """Our own address on the route to a host; asking costs no packet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise UsageError(
            f"there is no way from here to {host}, where the workers meet: {error}",
            hint="correct init_method or MASTER_ADDR, or say where to listen: Options(listen=…)",
        ) from error
    return f"[{found}]" if family == socket.AF_INET6 else found
