"""How a process joins a world as a worker, where it listens, and the default worker of a process.

A *closed* world has a size: all of its workers meet, and leave together. An *open* one has none:
each worker joins those that are there, and leaves alone.
"""

from __future__ import annotations

import atexit
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import cast

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.membership.open_world import RosterStore
from gradwire.agent.membership.rendezvous import meet, open_store
from gradwire.agent.peers.directory import Directory, Member, check_name
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import SignedStore, find_secret
from gradwire.agent.requests.timer import MonotonicClock
from gradwire.agent.serving.dispatch import Interceptor
from gradwire.current import ProcessValue, current_worker
from gradwire.errors import DeadlinePassed, PeerLost, UsageError
from gradwire.ids import LAST_WORKER
from gradwire.options import Options, faults_from_environment, rendezvous_host, tls_from_environment
from gradwire.rpc.behavior import NATIVE, Behavior
from gradwire.rpc.worker import Exposed, Worker
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener, Transport
from gradwire.transport.shared_memory import SHARED_AT_MOST
from gradwire.transport.tcp import TcpTransport
from gradwire.transport.tls import TlsTransport
from gradwire.transport.unix import UnixTransport

MakeWorker = Callable[[Directory, str, RosterStore | None], Worker]
"""Makes the worker of a directory and a job; in an open world with its roster."""

_UNDO_SECONDS = 2.0
_HINTS = {
    "tcp": "this worker has a certificate and uses TLS: start the other one with tls=… too",
    "tls": "this worker has no certificate: start it with Options(tls=Tls(…)) or GRADWIRE_TLS_CERT",
}
_LOOPBACK = {"localhost", "127.0.0.1", "::1", ""}
_log = logging.getLogger("gradwire")
_last_store: ProcessValue[Store] = ProcessValue()
"""The rendezvous store that this process used last."""


def join(
    name: str,
    rank: int,
    world_size: int | None,
    options: Options,
    *,
    expose: Exposed = (),
    behavior: Behavior = NATIVE,
    store: Store | None = None,
    note: str = "",
) -> Worker:
    """Join a world and return the worker: a closed one of `world_size` workers, or an open one.

    Workers meet at `store`, by default the one that `options.init_method` names. `note` is shown to
    the others in their directories.
    """
    check_name(name)
    _check_rank(name, rank, world_size)
    secret, refusals = find_secret(options), Refusals()
    transports = transports_for(options, name, refusals)
    listener = listen(transports, options)
    try:
        store = store if store is not None else rendezvous_store(options, rank, world_size)
        signed = SignedStore(store, secret, refusals)

        def make_worker(directory: Directory, job: str, roster: RosterStore | None) -> Worker:
            return Worker(
                *(directory, job, secret, transports, listener, options, expose),
                store=store,
                behavior=behavior,
                refusals=refusals,
                interceptor=_maybe_interceptor(directory),
                roster=roster,
            )

        me = Member(rank, name, listener.address, options.incarnation, note)
        if world_size is None:
            return _join_open(me, signed, transports, options, make_worker)
        return _join_closed(me, signed, world_size, options, make_worker)
    except BaseException:
        listener.close()
        raise


def _check_rank(name: str, rank: int, world_size: int | None) -> None:
    if world_size is not None and not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not between 0 and {world_size - 1}")
    if not 0 <= rank <= LAST_WORKER:
        raise UsageError(f"rank {rank} of {name} is not between 0 and {LAST_WORKER}")


def rendezvous_store(options: Options, rank: int | None, world_size: int | None) -> Store:
    """The store that `options.init_method` names.

    Note [The last rendezvous store]: after a shutdown, peers may still be on their way to the store
    to meet again. So a process that hosts it keeps it open until it has opened the next one, or
    joins one that another process hosts, which waits for the port until then.
    """
    is_again = _last_store.value is not None
    if rank != 0:
        _last_store.value = None  # the host of the next one may need its port
    return open_store(options, rank, world_size, is_again=is_again)


def _join_closed(
    me: Member, store: SignedStore, world_size: int, options: Options, make_worker: MakeWorker
) -> Worker:
    """Meet the others; or rejoin as a later incarnation, and connect to those that are there.

    A worker that is not there will find this one when it is back. The first worker, which is often
    the one that makes the calls, is told last: when it knows of us, so do the others.
    """
    clock = MonotonicClock()
    met = meet(store, me, world_size, options, clock)
    worker = make_worker(met.directory, met.job, None)
    for other in reversed(met.directory.others() if me.incarnation else []):
        with suppress(PeerLost, DeadlinePassed):
            worker.agent.reach(other.id, clock.now() + options.timeouts.connect)
    return worker


def _join_open(
    me: Member,
    store: SignedStore,
    transports: Transports,
    options: Options,
    make_worker: MakeWorker,
) -> Worker:
    """Join those that are there. If it fails, the registration is undone and peers are told."""
    clock, patience = MonotonicClock(), options.timeouts.join
    limit = clock.now() + patience
    roster = RosterStore(store, transports, clock)
    me = roster.register(me.name, me.id, me.address, limit, me.note)
    worker = None
    try:
        job, others = roster.before(me, limit - patience / 2)
        worker = make_worker(Directory(me.id, [*others, me], is_open=True), job, roster)
        worker.announce(limit)
    except BaseException:
        with suppress(RuntimeError):  # the store is gone, with all that is in it
            roster.unregister({me.incarnation}, limit)
        if worker is not None:
            worker.shutdown(graceful=True, timeout=_UNDO_SECONDS)
        raise
    return worker


def _maybe_interceptor(directory: Directory) -> Interceptor | None:
    """The faults that GRADWIRE_FAULTS asks for."""
    if not faults_from_environment():
        return None
    failpoints = import_module("gradwire.testing.failpoints")  # a layer above, for tests only
    return cast(Interceptor, failpoints.failpoints_by_environment(directory, MonotonicClock()))


def set_default_worker(worker: Worker) -> None:
    """Make it the worker of all code in this process that is in no worker's scope."""
    if current_worker.maybe_default() is not None:
        raise UsageError("RPC is already initialized", hint="call shutdown() first")
    atexit.register(worker.close, 0.1)  # closes sockets if shutdown() was not called
    current_worker.set_default(worker)
    _last_store.value = worker.store  # see Note [The last rendezvous store]


def clear_default_worker(worker: Worker) -> None:
    """Remove the default worker, so that the process can join again."""
    current_worker.set_default(None)
    atexit.unregister(worker.close)


def transports_for(options: Options, name: str, refusals: Refusals | None = None) -> Transports:
    """The transports by which the worker of that name reaches other processes.

    Plain TCP is limited to this machine unless `options.insecure` is set. A worker that has a
    certificate never uses it: an address from the rendezvous could be anywhere.
    """
    tls = options.tls or tls_from_environment()
    stall, limits, checksum = options.timeouts.stall, options.limits, options.checksum
    shared_bytes = SHARED_AT_MOST if options.shared_memory else 0
    counted = refusals or Refusals()

    def refused(kind: str, remote: str) -> None:
        if counted.count(kind, remote):
            _log.warning("refused %s: %s", remote, kind)

    unix = UnixTransport(
        stall=stall, limits=limits, shared_bytes=shared_bytes, checksum=checksum, refused=refused
    )
    known: dict[str, Transport] = {"unix": unix}
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
        )
        if name not in over_tls.names:
            raise UsageError(
                f"{name} has a certificate for {', '.join(over_tls.names)}",
                hint=f"`gradwire certs --workers {name}` makes one for it",
            )
    return Transports(known, _HINTS)


def listen(transports: Transports, options: Options) -> Listener:
    """Open the listener that `options.listen` asks for.

    With `auto`, it is a unix socket if the rendezvous is on this machine. Otherwise it is the local
    address on the route to the rendezvous host.
    """
    if options.insecure:
        _log.warning(
            "insecure=True: traffic to other machines may go without TLS, where anyone on the "
            "network path can read and change it"
        )
    address = options.listen
    if address == "auto":
        host = rendezvous_host(options.init_method)
        address = "unix" if host in _LOOPBACK else f"tcp://{_address_towards(host)}:0"
    if address == "unix":
        return transports.listen("unix://")
    if "tls" in transports.schemes and address.startswith("tcp://"):
        address = "tls" + address.removeprefix("tcp")  # this worker has a certificate
    return transports.listen(address)


def _address_towards(host: str) -> str:
    """The local address on the route to a host. This sends no packet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise UsageError(
            f"no route to rendezvous host {host}: {error}",
            hint="correct init_method or MASTER_ADDR, or set Options(listen=…)",
        ) from error
    return f"[{found}]" if family == socket.AF_INET6 else found
