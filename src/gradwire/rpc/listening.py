"""Where a worker of its own process listens, and by what means it reaches the others."""

from __future__ import annotations

import logging
import socket

from gradwire.agent.refusals import Refusals
from gradwire.errors import UsageError
from gradwire.options import Options, rendezvous_host
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener
from gradwire.transport.shared import SHARED_AT_MOST
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.unix import UnixTransport

_LOOPBACK = {"localhost", "127.0.0.1", "::1", ""}
_log = logging.getLogger("gradwire")


def transports_for(options: Options, refusals: Refusals | None = None) -> Transports:
    """All that can reach another process; plain TCP beyond this machine only if asked for."""
    stall, limits, checksum = options.timeouts.stall, options.limits, options.checksum
    shared_bytes = SHARED_AT_MOST if options.shared_memory else 0
    counted = refusals or Refusals()

    def refused(kind: str, remote: str) -> None:
        if counted.count(kind, remote):
            _log.warning("refused %s: %s", remote, kind)

    return Transports(
        {
            "unix": UnixTransport(
                stall=stall,
                limits=limits,
                shared_bytes=shared_bytes,
                checksum=checksum,
                refused=refused,
            ),
            "tcp": TcpTransport(
                stall=stall,
                limits=limits,
                checksum=checksum,
                this_host_only=not options.insecure,
            ),
        }
    )


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
        return transports.listen(options.listen)
    host = rendezvous_host(options.init_method)
    if host in _LOOPBACK:
        return transports.listen("unix://")
    return transports.listen(f"tcp://{_address_towards(host)}:0")


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
