"""How a process becomes a worker, and whose calls the process makes from then on.

A *closed* world has a size: all of its workers meet, and leave together. An *open* one has none:
each joins whoever is there, and leaves alone.
"""

from __future__ import annotations

import atexit
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.membership.open_world import RosterStore
from gradwire.agent.membership.rendezvous import meet, meet_again, open_store
from gradwire.agent.peers.directory import Directory, check_name
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret, find_secret
from gradwire.agent.peers.signed_store import SignedStore
from gradwire.agent.peers.state import Member
from gradwire.agent.requests.timer import MonotonicClock
from gradwire.autograd import api as autograd_api
from gradwire.current import Door
from gradwire.errors import DeadlinePassed, PeerLost, UsageError
from gradwire.ids import LAST_WORKER
from gradwire.options import Options
from gradwire.rpc.behavior import NATIVE, Behavior
from gradwire.rpc.listening import listen, transports_for
from gradwire.rpc.rref import home_door
from gradwire.rpc.worker import Exposed, Worker
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener

_UNDO_SECONDS = 2.0
_last_place: Door[Store] = Door("the store where this process met others last")


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
    """A worker that has met the others: all `world_size` of them, or whoever is there without one.

    They meet at `store`, by default at the one that `options.init_method` names. Every other worker
    finds `note` in its directory.
    """
    check_name(name)
    if world_size is not None and not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of {world_size} workers")
    if not 0 <= rank <= LAST_WORKER:
        raise UsageError(f"rank {rank} of {name} is not between 0 and {LAST_WORKER}")
    secret, refusals = find_secret(options), Refusals()
    transports = transports_for(options, name, refusals)
    listener = listen(transports, options)
    try:
        store = store if store is not None else meeting_place(options, rank, world_size)
        joining = _Joining(
            name,
            rank,
            options,
            expose,
            behavior,
            store,
            secret,
            refusals,
            transports,
            listener,
            note,
        )
        return joining.open() if world_size is None else joining.closed(world_size)
    except BaseException:
        listener.close()
        raise


def meeting_place(options: Options, rank: int | None, world_size: int | None) -> Store:
    """The store that `options.init_method` names.

    Note [The last meeting place]: others may be on their way to meet us again where we met last, so
    that the process which hosted it keeps it until it has opened the next, or joins one that
    another hosts. That one waits for the port until then.
    """
    is_again = _last_place.maybe_default() is not None
    if rank != 0:
        _last_place.set_default(None)  # whoever hosts the next may want its port
    return open_store(options, rank, world_size, is_again=is_again)


def forget_meeting_place() -> None:
    """Close the store that is still open here: nobody will meet there again."""
    _last_place.set_default(None)


class _Joining:
    """What both ways to join need."""

    def __init__(
        self,
        name: str,
        rank: int,
        options: Options,
        expose: Exposed,
        behavior: Behavior,
        store: Store,
        secret: Secret,
        refusals: Refusals,
        transports: Transports,
        listener: Listener,
        note: str,
    ) -> None:
        self._name, self._rank, self._options = name, rank, options
        self._expose, self._behavior, self._store = expose, behavior, store
        self._secret, self._refusals = secret, refusals
        self._signed = SignedStore(store, secret, refusals)
        self._transports, self._listener = transports, listener
        self._note = note
        self._clock = MonotonicClock()

    def closed(self, world_size: int) -> Worker:
        address, options = self._listener.address, self._options
        if options.life:
            return self._back(world_size)
        met = meet(
            self._signed,
            self._name,
            address,
            self._rank,
            world_size,
            options,
            self._clock,
            self._note,
        )
        return self._worker(met.directory, met.job)

    def _back(self, world_size: int) -> Worker:
        """In a later life: tell those who are there. Who is not will look for us, if it comes back.

        They have gone on meanwhile: nothing is asked of them but to take note. The first, which is
        often the one that asks, is told last: when it knows of us, so do the others.
        """
        options, address = self._options, self._listener.address
        me = Member(self._rank, self._name, address, options.life, self._note)
        met = meet_again(self._signed, me, world_size, options, self._clock)
        worker = self._worker(met.directory, met.job)
        for other in reversed(met.directory.others()):
            limit = self._clock.now() + options.timeouts.connect
            with suppress(PeerLost, DeadlinePassed):
                worker.agent.reach(other.id, limit)
        return worker

    def open(self) -> Worker:
        """If this fails, nobody looks for us, and who has heard of us hears that we left."""
        patience = self._options.timeouts.join
        limit = self._clock.now() + patience
        roster = RosterStore(self._signed, self._transports, self._clock)
        address = self._listener.address
        me = roster.register(self._name, self._rank, address, limit, self._note)
        worker = None
        try:
            job, others = roster.before(me, limit - patience / 2)
            directory = Directory(self._rank, [*others, me], is_open=True)
            worker = self._worker(directory, job)
            worker.announce(limit)
        except BaseException:
            with suppress(RuntimeError):  # the store is gone, with all that is in it
                roster.unregister({me.life}, limit)
            if worker is not None:
                worker.shutdown(graceful=True, timeout=_UNDO_SECONDS)
            raise
        return worker

    def _worker(self, directory: Directory, job: str) -> Worker:
        return Worker(
            directory,
            job,
            self._secret,
            self._transports,
            self._listener,
            self._options,
            self._expose,
            store=self._store,
            behavior=self._behavior,
            refusals=self._refusals,
        )


def settle_here(worker: Worker) -> None:
    """Code of this process that belongs to no other worker belongs to this one."""
    if home_door.maybe_default() is not None:
        raise UsageError("RPC is already initialized", hint="call shutdown() first")
    atexit.register(worker.close, 0.1)  # a program that ends without shutdown() leaves no socket
    home_door.set_default(worker)
    _last_place.set_default(worker.store)  # see Note [The last meeting place]
    autograd_api.door.set_default(worker.engine)


def move_out(worker: Worker) -> None:
    """The process is free to be another worker."""
    home_door.set_default(None)
    autograd_api.door.set_default(None)
    atexit.unregister(worker.close)
