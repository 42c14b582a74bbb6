"""How a process joins a world as a worker, and the default worker of a process.

A *closed* world has a size: all of its workers meet, and leave together. An *open* one has none:
each worker joins those that are there, and leaves alone.
"""

from __future__ import annotations

import atexit
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
from gradwire.options import Options, faults_from_environment
from gradwire.rpc.behavior import NATIVE, Behavior
from gradwire.rpc.listening import listen, reachable_address, transports_for
from gradwire.rpc.worker import Exposed, Worker
from gradwire.transport.address import Transports

MakeWorker = Callable[[Directory, str, RosterStore | None], Worker]
"""Makes the worker of a directory and a job; in an open world with its roster."""

_UNDO_SECONDS = 2.0
_last_store: ProcessValue[Store] = ProcessValue()
"""The rendezvous store that this process used last."""
last_left: ProcessValue[Refusals] = ProcessValue()
"""The refusals of the default worker of this process that left last."""


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

        address = reachable_address(listener.address, options)
        me = Member(rank, name, address, options.incarnation, note)
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
    last_left.value = worker.refusals
    atexit.unregister(worker.close)
