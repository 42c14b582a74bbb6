"""Where a worker listens, what address it tells its peers, and by which transports it reaches them.

This file must not know how workers meet: it reads the rendezvous host from the options only.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

from gradwire.agent.peers.refusals import Refusals
from gradwire.errors import UsageError
from gradwire.options import Options, Tls, rendezvous_host, tls_from_environment
from gradwire.transport.address import NEAR, Address, Transports, parse_address
from gradwire.transport.base import Listener, Transport
from gradwire.transport.near import ManyListeners, NearTransport, this_machine
from gradwire.transport.shared_memory import SHARED_AT_MOST
from gradwire.transport.tcp import TcpTransport, is_wildcard
from gradwire.transport.tls import ONE_AUTHORITY, TlsTransport
from gradwire.transport.unix import UnixTransport

_HINTS = {
    "tcp": "this worker has a certificate and uses TLS: start the other one with tls=… too",
    "tls": "this worker has no certificate: start it with Options(tls=Tls(…)) or GRADWIRE_TLS_CERT",
}
_LOOPBACK = {"localhost", "127.0.0.1", "::1", ""}
_log = logging.getLogger("gradwire")


def transports_for(options: Options, name: str, refusals: Refusals | None = None) -> Transports:
    """The transports by which the worker of that name reaches other processes.

    Plain TCP is limited to this machine unless `options.insecure` is set. A worker that has a
    certificate never uses it: an address from the rendezvous could be anywhere.
    """
    tls = _files_of(name, options.tls or tls_from_environment())
    stall, limits, checksum = options.timeouts.stall, options.limits, options.checksum
    shared_bytes = SHARED_AT_MOST if options.shared_memory else 0
    counted = refusals or Refusals()

    def refused(kind: str, remote: str) -> None:
        if counted.count(kind, remote):
            _log.warning("%s refused %s: %s", name, remote, kind)

    def refused_by(kind: str, remote: str) -> None:
        if counted.count(kind, remote):
            _log.warning("%s refused %s: %s; %s", remote, name, kind, ONE_AUTHORITY)

    unix = UnixTransport(
        stall=stall, limits=limits, shared_bytes=shared_bytes, checksum=checksum, refused=refused
    )
    known: dict[str, Transport] = {"unix": unix, "near": NearTransport(unix)}
    if tls is None:
        known["tcp"] = TcpTransport(
            stall=stall, limits=limits, checksum=checksum, this_host_only=not options.insecure
        )
    else:
        known["tls"] = over_tls = TlsTransport(
            tls,
            stall=stall,
            limits=limits,
            patience=options.timeouts.handshake,
            refused=refused,
            refused_by=refused_by,
        )
        if name not in over_tls.names:
            raise UsageError(
                f"{name} has a certificate for {', '.join(over_tls.names)}",
                hint=f"`gradwire certs --workers {name}` makes one for it",
            )
    return Transports(known, _HINTS)


def _files_of(name: str, tls: Tls | None) -> Tls | None:
    """The files of one worker, whose name stands in the place of `{name}`."""
    if tls is None:
        return None
    certificate, key = (path.replace("{name}", name) for path in (tls.certificate, tls.key))
    return Tls(certificate=certificate, key=key, authority=tls.authority)


def listen(transports: Transports, options: Options) -> Listener:
    """Open the listener that `options.listen` asks for.

    With `auto`, it is a unix socket if the rendezvous is on this machine. Otherwise there are two,
    a unix socket for workers of this machine, and the local address on the route to the rendezvous
    host for the others.
    """
    if options.insecure:
        _log.warning(
            "insecure=True: traffic to other machines may go without TLS, where anyone on the "
            "network path can read and change it"
        )
    address = options.listen
    if address == "auto":
        host = rendezvous_host(options.init_method)
        if host not in _LOOPBACK:
            return _listen_near_and_far(transports, host)
        address = "unix"
    return _listen_at(transports, "unix://" if address == "unix" else address)


def _listen_near_and_far(transports: Transports, host: str) -> Listener:
    far = _listen_at(transports, str(Address("tcp", _local_address_towards(host), 0)))
    if not this_machine():
        return far
    try:
        return ManyListeners([transports.listen(NEAR), far])
    except BaseException:
        far.close()
        raise


def _listen_at(transports: Transports, address: str) -> Listener:
    if "tls" in transports.schemes and address.startswith("tcp://"):
        address = "tls" + address.removeprefix("tcp")  # this worker has a certificate
    return transports.listen(address)


def reachable_address(bound: str, options: Options) -> str:
    """The address that peers are told of a listener.

    Nobody can connect to a wildcard (0.0.0.0, ::). The others reach the rendezvous host, so in its
    place they are told the local address on the route to there.
    """
    where = parse_address(bound)
    if where.port is None or not is_wildcard(where.place):
        return bound
    host = rendezvous_host(options.init_method)
    if not host:
        raise UsageError(
            f"workers cannot connect to {bound}, and no rendezvous host tells which address of "
            "this machine they can reach",
            hint=f'name it: Options(listen="tcp://ADDRESS:{where.port}")',
        )
    ipv4_only = socket.AF_INET if where.place == "0.0.0.0" else socket.AF_UNSPEC
    return str(replace(where, place=_local_address_towards(host, ipv4_only)))


def _local_address_towards(host: str, family: int = socket.AF_UNSPEC) -> str:
    """The local address on the route to a host. This sends no packet."""
    try:
        found = socket.getaddrinfo(host, 9, family=family, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"no route to rendezvous host {host}: {error}",
            hint="correct init_method or MASTER_ADDR, or set Options(listen=…)",
        ) from error
