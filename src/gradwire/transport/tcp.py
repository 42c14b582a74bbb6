"""Frames over TCP, to this host or another; IPv4 and IPv6.

Plain TCP neither encrypts nor authenticates; the agent's handshake does the latter. Host names are
resolved by the operating system, and no deadline can interrupt that.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, final

from gradwire.errors import DeadlinePassed, PeerLost, UsageError
from gradwire.options import Limits
from gradwire.transport.address import Address, parse_address
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.sockets.channel import ChannelFactory, SocketChannel
from gradwire.transport.sockets.listener import SocketListener
from gradwire.transport.sockets.stream import reason_of

_DEFAULT_HOST = "127.0.0.1"
_BACKLOG = 1024
_PROBES = 3
_NEAR_BUFFER = 1 << 18
_LONGEST_CONNECT = 86400.0

_Resolved: TypeAlias = tuple[socket.AddressFamily, tuple[object, ...]]
_Places: TypeAlias = Callable[[str, str, int], list[_Resolved]]


@final
class TcpTransport:
    """The transport for tcp://host:port; with `this_host_only` for loopback addresses only."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        stall: float | None = None,
        pool: BlockPool | None = None,
        checksum: bool = False,
        this_host_only: bool = False,
    ) -> None:
        self._factory = ChannelFactory(limits, stall, pool, checksum=checksum)
        self._places = _near_places if this_host_only else _all_places

    def listen(self, address: str) -> SocketListener:
        """Listen on the port, or on a free one for port 0; on loopback if no host is named."""
        sock, bound = listening(address, "tcp", self._places)
        return SocketListener(sock, bound, self._accepted)

    def connect(self, address: str, deadline: float, name: str | None = None) -> SocketChannel:
        """Connect to the first address of the host that answers."""
        sock = connected(address, "tcp", deadline, self._factory.stall, self._places)
        return self._factory.channel(sock, address)

    def _accepted(self, sock: socket.socket) -> SocketChannel:
        return self._factory.channel(sock, tuned(sock, "tcp", self._factory.stall))


def _all_places(address: str, host: str, port: int) -> list[_Resolved]:
    return _resolve(host, port)


def _near_places(address: str, host: str, port: int) -> list[_Resolved]:
    """Resolve a host; UsageError if one of its addresses is not loopback.

    The addresses that were checked are the ones used, even if the name changes meanwhile.
    """
    places = _resolve(host, port)
    if not all(_is_near(place) for _, place in places):
        raise UsageError(
            f"{address} is on another machine, and plain TCP is not secure: anyone on the network "
            "could read and change the traffic",
            hint="use TLS with a certificate for each worker, listen on 127.0.0.1 or a unix "
            "socket, or pass Options(insecure=True) if the network is private "
            "(GRADWIRE_INSECURE=1 under gradwire.compat)",
        )
    return places


def listening(
    address: str, scheme: str, places: _Places = _all_places
) -> tuple[socket.socket, str]:
    """A listening socket, and its address with the actual port."""
    where = _address_of(address, scheme)
    host = where.place or _DEFAULT_HOST
    try:
        family, place = places(address, host, where.port or 0)[0]
        sock = _listening(family, place)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {reason_of(error)}") from error
    return sock, str(Address(scheme, host, sock.getsockname()[1]))


def connected(
    address: str, scheme: str, deadline: float, stall: float, places: _Places = _all_places
) -> socket.socket:
    """A socket connected to the listener at the address."""
    where = _address_of(address, scheme)
    if not (where.place and where.port):
        raise UsageError(f"{address} does not say which host and port to connect to")
    with named_errors(address):
        return _connected(places(address, where.place, where.port), deadline, stall)


def tuned(sock: socket.socket, scheme: str, stall: float) -> str:
    """Set the options of an accepted socket; returns the address of the peer."""
    host, port = sock.getpeername()[:2]
    _tune(sock, stall)
    _tune_near(sock)
    return str(Address(scheme, host, port))


def _address_of(address: str, scheme: str) -> Address:
    parsed = parse_address(address)
    if parsed.scheme != scheme:
        raise UsageError(f"{address} is not a {scheme} address", hint=f"{scheme}://host:port")
    return parsed


def _resolve(host: str, port: int) -> list[_Resolved]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, place) for family, _, _, _, place in found]
    except UnicodeError as error:
        # Python encodes the name first, and raises this for a label that is empty or over 63 bytes.
        raise socket.gaierror(socket.EAI_NONAME, "name or service not known") from error


def _is_near(place: tuple[object, ...]) -> bool:
    return ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback


def _listening(family: socket.AddressFamily, place: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def named_errors(address: str) -> Iterator[None]:
    """Translate the OSErrors of a connect into DeadlinePassed and PeerLost."""
    try:
        yield
    except TimeoutError as error:
        raise DeadlinePassed(f"{address} did not answer before the deadline") from error
    except OSError as error:
        raise PeerLost(f"cannot reach {address}: {reason_of(error)}") from error


def _connected(places: list[_Resolved], deadline: float, stall: float) -> socket.socket:
    failure: OSError = TimeoutError("no time was left")
    for family, place in places:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _tune(sock, stall)
            sock.settimeout(min(left, _LONGEST_CONNECT))
            sock.connect(place)
            _refuse_own_echo(sock)
            _tune_near(sock)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _refuse_own_echo(sock: socket.socket) -> None:
    # A connect to an unused port of the ephemeral range may connect the socket to itself.
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError("connection refused")


def _tune(sock: socket.socket, stall: float) -> None:
    """Send small frames at once, and detect a vanished host in about `stall` idle seconds.

    Keepalive, not TCP_USER_TIMEOUT: that also ends connections to a live peer that does not read,
    which a send with a deadline must survive.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, math.ceil(stall / (_PROBES + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _tune_near(sock: socket.socket) -> None:
    """On loopback, set buffers that fit in the processor's cache.

    For other hosts a fixed size would disable the kernel's buffer auto-tuning.
    """
    if _is_near(sock.getpeername()):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NEAR_BUFFER)
