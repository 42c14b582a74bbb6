"""How a process joins a world as a worker, and the default worker of a process.

A *closed* world has a size: all of its workers meet, and leave together. An *open* one has none:
each worker joins those that are there, and leaves alone.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import cast

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.membership.open_world import RosterStore
from gradwire.agent.membership.rendezvous import StoreLost, await_name, meet, open_store
from gradwire.agent.peers.directory import Directory, Member, check_name
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import (
    Secret,
    SignedStore,
    find_secret,
    has_secret,
    shared_secret,
)
from gradwire.agent.requests.timer import MonotonicClock
from gradwire.agent.serving.dispatch import Interceptor
from gradwire.current import ProcessValue, current_worker
from gradwire.errors import DeadlinePassed, PeerLost, UsageError
from gradwire.ids import LAST_WORKER
from gradwire.options import (
    Options,
    faults_from_environment,
    place_from_environment,
    rendezvous_host,
)
from gradwire.places import Place
from gradwire.rpc.behavior import NATIVE, Behavior
from gradwire.rpc.listening import listen, reachable_address, transports_for
from gradwire.rpc.worker import Exposed, Worker
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener

MakeWorker = Callable[[Directory, str, RosterStore | None], Worker]
"""Makes the worker of a directory and a job; in an open world with its roster."""

_UNDO_SECONDS = 2.0
_NONE_OF_OURS = object()
_last_store: ProcessValue[object] = ProcessValue()
"""The rendezvous store that this process used last, unless another process hosts the next one."""
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
    clock = MonotonicClock()
    deadline = clock.now() + options.timeouts.join
    place = _maybe_own_place(rank, world_size)
    if place is not None:
        options = _at_place(options, place, deadline)
    refusals = Refusals()
    with _secret_for(options, place) as (secret, offered):
        transports = transports_for(options, name, refusals)
        listener = listen(transports, options)

        def join_at(store: Store) -> Worker:
            signed = SignedStore(store, secret, refusals, offered)
            make = partial(
                _make_worker, (transports, listener, options, expose), behavior, refusals, signed
            )
            if world_size is None:
                return _join_open(me, signed, transports, options, make)
            return _join_closed(me, signed, world_size, options, deadline, make)

        try:
            address = reachable_address(listener.address, options)
            me = Member(rank, name, address, options.incarnation, note)
            if store is not None:
                return join_at(store)
            return _join_where_all_meet(join_at, options, rank, world_size, deadline)
        except BaseException:
            listener.close()
            raise


def _make_worker(
    place: tuple[Transports, Listener, Options, Exposed],
    behavior: Behavior,
    refusals: Refusals,
    store: SignedStore,
    directory: Directory,
    job: str,
    roster: RosterStore | None,
) -> Worker:
    assert store.secret is not None, "joining ends with a secret"
    return Worker(
        *(directory, job, store.secret, *place),
        store=store.inner,
        behavior=behavior,
        refusals=refusals,
        interceptor=_maybe_interceptor(directory),
        roster=roster,
    )


def _join_where_all_meet(
    join_at: Callable[[Store], Worker],
    options: Options,
    rank: int,
    world_size: int | None,
    deadline: float,
) -> Worker:
    """Join at the store that the options name.

    A worker that joins for a second time may find the store of the earlier world, whose host frees
    the port only when it joins again itself. Then that store is lost, and the next one is awaited.
    """
    while True:
        is_again = _has_met_before()
        try:
            return join_at(rendezvous_store(options, rank, world_size, deadline))
        except StoreLost:
            if not is_again or time.monotonic() >= deadline:
                raise


def _maybe_own_place(rank: int, world_size: int | None) -> Place | None:
    """The place that a launcher gave this process, if it is the one that this worker takes."""
    place = place_from_environment()
    is_own = place is not None and (place.rank, place.world_size) == (rank, world_size)
    return place if is_own else None


def _at_place(options: Options, place: Place, deadline: float) -> Options:
    """Take from the launcher what the options leave open: where to meet, and where to listen."""
    if options.init_method == Options().init_method:
        options = replace(options, init_method=place.init_method)
    if place.is_one_machine and options.listen == "auto":
        return replace(options, listen="unix")
    await_name(rendezvous_host(options.init_method), deadline)
    return options


@contextmanager
def _secret_for(
    options: Options, place: Place | None
) -> Iterator[tuple[Secret | None, str | None]]:
    """The secret of the job, and its path if this worker has made it for the others.

    If no worker was given one, and a launcher has started all of them on this machine, rank 0 makes
    one, which lasts until all have joined. The others find it through the rendezvous.
    """
    if has_secret(options) or place is None or not place.is_one_machine:
        yield find_secret(options), None
    elif place.rank == 0:
        with shared_secret() as path:
            yield find_secret(replace(options, secret=path)), path
    else:
        yield None, None


def _check_rank(name: str, rank: int, world_size: int | None) -> None:
    if world_size is not None and not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not between 0 and {world_size - 1}")
    if not 0 <= rank <= LAST_WORKER:
        raise UsageError(f"rank {rank} of {name} is not between 0 and {LAST_WORKER}")


def rendezvous_store(
    options: Options, rank: int | None, world_size: int | None, deadline: float | None = None
) -> Store:
    """The store that `options.init_method` names.

    Note [The last rendezvous store]: after a shutdown, peers may still be on their way to the store
    to meet again. So a process that hosts it keeps it open until it has opened the next one, or
    joins one that another process hosts, which waits for the port until then.
    """
    is_again = _has_met_before()
    if rank != 0 and is_again:
        _last_store.value = _NONE_OF_OURS  # the host of the next one may need its port
    return open_store(options, rank, world_size, is_again=is_again, deadline=deadline)


def _has_met_before() -> bool:
    return _last_store.value is not None


def _join_closed(
    me: Member,
    store: SignedStore,
    world_size: int,
    options: Options,
    deadline: float,
    make_worker: MakeWorker,
) -> Worker:
    """Meet the others; or rejoin as a later incarnation, and connect to those that are there.

    A worker that is not there will find this one when it is back. The first worker, which is often
    the one that makes the calls, is told last: when it knows of us, so do the others.
    """
    clock = MonotonicClock()
    met = meet(store, me, world_size, deadline, clock)
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
        directory = Directory(me.id, [*others, me], is_open=True)
        worker = make_worker(directory, job, roster)
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
