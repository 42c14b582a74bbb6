"""Frames over TCP, to this host or another; IPv4 and IPv6.

Plain TCP neither encrypts nor authenticates; the agent's handshake does the latter. No deadline can
interrupt the operating system while it resolves a host name.
"""

from __future__ import annotations

import ipaddress
import math
import socket
from functools import partial
from typing import TypeAlias, final

from gradwire.errors import UsageError
from gradwire.options import Limits
from gradwire.transport.address import Address, parse_address
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.sockets import stream
from gradwire.transport.sockets.channel import LIMITS, STALL, SocketChannel

_DEFAULT_HOST = "127.0.0.1"
_THIS_HOST = {"127.0.0.1", "::1", "localhost"}
_PROBES = 3
_NEAR_BUFFER = 1 << 18

_Resolved: TypeAlias = tuple[socket.AddressFamily, tuple[object, ...]]


@final
class TcpTransport:
    """The transport for tcp://host:port; with `this_host_only` for loopback addresses only."""

    def __init__(
        self,
        *,
        limits: Limits = LIMITS,
        stall: float = STALL,
        checksum: bool = False,
        this_host_only: bool = False,
    ) -> None:
        self._stall, self._this_host_only = stall, this_host_only
        self._channel = partial(
            SocketChannel, limits=limits, stall=stall, pool=BlockPool(), checksum=checksum
        )

    def listen(self, address: str) -> stream.SocketListener:
        """Listen on the port, or on a free one for port 0; on loopback if no host is named."""
        sock, bound = listening(address, "tcp", this_host_only=self._this_host_only)
        return stream.SocketListener(
            sock, bound, lambda sock: self._channel(sock, tuned(sock, "tcp", self._stall))
        )

    def connect(self, address: str, deadline: float, name: str | None = None) -> SocketChannel:
        """Connect to the first address of the host that answers."""
        near = self._this_host_only
        sock = connected(address, "tcp", deadline, self._stall, this_host_only=near)
        return self._channel(sock, address)


def listening(
    address: str, scheme: str, *, this_host_only: bool = False
) -> tuple[socket.socket, str]:
    """A listening socket, and its address with the actual port."""
    where = parse_address(address, scheme)
    host = where.place or _DEFAULT_HOST
    try:
        family, place = _resolve(address, host, where.port or 0, this_host_only)[0]
        sock = stream.listening_socket(family, place)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {stream.reason_of(error)}") from error
    bound, port = sock.getsockname()[:2]
    # A wildcard may be written in many ways (0, 0x0, *); peers must not be told any of them.
    return sock, str(Address(scheme, bound if is_wildcard(bound) else host, port))


def is_wildcard(host: str) -> bool:
    """Whether it means all addresses of this machine: 0.0.0.0 or ::."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a host name
        return False


def connected(
    address: str, scheme: str, deadline: float, stall: float, *, this_host_only: bool = False
) -> socket.socket:
    """A socket connected to the listener at the address."""
    where = parse_address(address, scheme)
    if not (where.place and where.port):
        raise UsageError(f"{address} does not say which host and port to connect to")
    with stream.connecting_to(address, blocked_hint=_port_hint(where)):
        failure: OSError = TimeoutError("no time was left")
        for family, place in _resolve(address, where.place, where.port, this_host_only):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(stream.seconds_until(deadline))
                sock.connect(place)
                # A connect to an unused port of the ephemeral range may reach the socket itself.
                if sock.getsockname() == sock.getpeername():
                    raise ConnectionRefusedError("connection refused")
                tuned(sock, scheme, stall)
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                failure = error
            else:
                return sock
        raise failure


def _port_hint(where: Address) -> str | None:
    if where.place in _THIS_HOST:
        return None
    return (
        f"firewalls must let the other workers connect to port {where.port} of {where.place}; "
        'Options(listen="tcp://0.0.0.0:PORT") there sets the port'
    )


def tuned(sock: socket.socket, scheme: str, stall: float) -> str:
    """Set the options of a connected socket; returns the address of the peer."""
    host, port = sock.getpeername()[:2]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A vanished host is detected in about `stall` idle seconds. Not by TCP_USER_TIMEOUT: that also
    # ends connections to a live peer that does not read, which a send with a deadline must survive.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, math.ceil(stall / (_PROBES + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # On loopback, buffers that fit in the processor's cache. For other hosts a fixed size would
    # disable the kernel's buffer auto-tuning.
    if _is_loopback(host):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NEAR_BUFFER)
    return str(Address(scheme, host, port))


def _resolve(address: str, host: str, port: int, this_host_only: bool) -> list[_Resolved]:
    """The socket addresses of a host; UsageError if one is not loopback but has to be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        # Python encodes the name first, and raises this for a label that is empty or over 63 bytes.
        raise socket.gaierror(socket.EAI_NONAME, "name or service not known") from error
    # The checked addresses are the ones used, even if the name resolves to others meanwhile.
    if this_host_only and not all(_is_loopback(str(place[0])) for *_, place in found):
        raise UsageError(
            f"{address} is on another machine, and plain TCP is not secure: anyone on the network "
            "could read and change the traffic",
            hint="use TLS with a certificate for each worker, listen on 127.0.0.1 or a unix "
            "socket, or pass Options(insecure=True) if the network is private "
            "(GRADWIRE_INSECURE=1 under gradwire.compat)",
        )
    return [(family, place) for family, _, _, _, place in found]


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
