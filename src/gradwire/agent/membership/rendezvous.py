"""How the workers of a closed world exchange names and addresses: through one of torch's stores.

Each worker writes its own entry and reads the others', all signed (peers/secret.py). The store is
needed only to join; the hosting process keeps it open until it has opened or joined another. An
open world keeps a roster in the store instead: see open_world.py. A wait of torch's stores is one
call into C++ that no signal interrupts, so this file polls instead, and sleeps in Python.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, final
from urllib.parse import urlparse, urlunparse

import msgspec
from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gradwire.agent.peers.directory import Directory, Member, Roster
from gradwire.agent.peers.secret import SignedStore
from gradwire.agent.requests.timer import Clock
from gradwire.errors import JoinTimeout, PeerLost, UsageError
from gradwire.options import Options, rendezvous_server

MIXED = (
    "RPC group mixes statically and dynamically initialized members which is not supported. "
    "Either all of them give a world_size, or none does."
)
ROUNDS = "gradwire/rounds"  # a counter: how many rounds of joining a closed world had in a store
_ROSTER = "gradwire/roster"
_LOOK_AGAIN_SECONDS = 0.02
_LONGEST_LOOK_AGAIN_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 0.1
_PORT_IS_TAKEN = os.strerror(errno.EADDRINUSE).lower()
_ANOTHER = (
    "if that is rank 0 of this job, give this process another rank; else end that program, or "
    "choose another port: MASTER_PORT, or that of init_method"
)
_OWN_RANK = "give every process a rank of its own"
_PLACES = "init_method is env:// (MASTER_ADDR, MASTER_PORT), tcp://host:port or file:///path"


class RendezvousEntry(msgspec.Struct, frozen=True):
    """What a worker writes about itself, with the world size that it was given."""

    name: str
    address: str
    note: str = ""
    incarnation: int = 0
    world_size: int = 0


_decode_entry = msgspec.json.Decoder(RendezvousEntry).decode


class Meeting(NamedTuple):
    """The result of a rendezvous. Keep the store, as this process may host it."""

    directory: Directory
    job: str


def open_store(
    options: Options, rank: int | None, world_size: int | None, *, is_again: bool = False
) -> Store:
    """The store that `init_method` names; without a world size, for any number of workers.

    `is_again`: this process has joined here before. Then rank 0's earlier store may still listen at
    this port, so a taken port is tried again.
    """
    url = options.init_method
    if urlparse(url).scheme not in ("env", "tcp", "file"):
        raise UsageError(f"no rendezvous at {url}", hint=_PLACES)
    deadline, pause = time.monotonic() + options.timeouts.join, _LOOK_AGAIN_SECONDS
    _await_server(url, rank, deadline)
    while True:
        seconds = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            found = rendezvous(_numbered(url, rank, world_size), timeout=seconds)
            return next(iter(found))[0]  # type: ignore[no-any-return]
        except ValueError as error:
            raise UsageError(f"no rendezvous at {url}: {error}", hint=_PLACES) from error
        except RuntimeError as error:
            if _PORT_IS_TAKEN not in str(error).lower():
                raise JoinTimeout(f"no rendezvous at {url}: {error}") from error
            if not is_again or time.monotonic() >= deadline:
                raise UsageError(
                    f"no rendezvous at {url}: something else listens at its port", hint=_ANOTHER
                ) from error
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_LOOK_AGAIN_SECONDS)  # torch warns each time


def _await_server(url: str, rank: int | None, deadline: float) -> None:
    """Wait until the store's host listens; torch's client would wait in C++."""
    server = rendezvous_server(url, rank)
    pause = _LOOK_AGAIN_SECONDS
    while server is not None:
        left = deadline - time.monotonic()
        try:
            timeout = min(max(left, 0.001), _CONNECT_SECONDS)
            socket.create_connection(server, timeout).close()
            return
        except OSError as error:
            if left <= 0:
                host, port = server
                raise JoinTimeout(
                    f"no rendezvous at {url}: nobody answers at {host}:{port}: {error}",
                    hint="start rank 0, which serves it, or increase Timeouts(join=…)",
                ) from error
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _numbered(url: str, rank: int | None, world_size: int | None) -> str:
    """The url as torch's handlers want it: a world size of -1 means unknown.

    A TCP store is never told the size: it would wait for all its clients in C++. `meet` waits.
    """
    asked = urlparse(url)
    world_size = world_size if asked.scheme == "file" else None
    ranked = "" if rank is None else f"rank={rank}"
    given = (asked.query, ranked, f"world_size={-1 if world_size is None else world_size}")
    return urlunparse(asked._replace(query="&".join(filter(None, given))))


def roster_in(store: SignedStore) -> tuple[Roster, str | None]:
    """The roster in this store, or a new one, and the text that encodes it, if any."""
    text = store.maybe_get(_ROSTER)
    if text is None:
        return Roster(uuid.uuid4().hex), None
    return msgspec.json.decode(text, type=Roster), text


def put_roster(store: SignedStore, roster: Roster, old: str | None) -> bool:
    """Replace the old text by this roster; False if the store holds another text by now."""
    return store.replace(_ROSTER, old, msgspec.json.encode(roster).decode())


def meet(
    store: SignedStore, me: Member, world_size: int, options: Options, clock: Clock
) -> Meeting:
    """Write this worker's entry, and wait for the entries of all others."""
    rounds = _Rounds(store, me, world_size, clock.now() + options.timeouts.join, clock)
    try:
        return rounds.meet()
    except DistNetworkError as error:
        raise PeerLost(
            "the rendezvous store was lost before every worker had joined: the process that "
            "hosts it, usually rank 0, has exited",
            hint=f"see that process's output for the cause; {_OWN_RANK}",
        ) from error


@final
class _Rounds:
    """The rounds of joining in one store, which may be used again after a shutdown or a failure.

    Rank 0 opens a round. The others join the latest, unless they have been in it already or rank 0
    has given it up: then they wait for the next.
    """

    def __init__(
        self, store: SignedStore, me: Member, world_size: int, deadline: float, clock: Clock
    ) -> None:
        self._store, self._me, self._world_size = store, me, world_size
        self._deadline, self._clock = deadline, clock
        self._checked: set[str] = set()  # entries whose world size was compared and is the same

    def meet(self) -> Meeting:
        store, me = self._store, self._me
        is_again = me.incarnation > 0
        if is_again:  # it rejoins the round of the earlier one, without the help of the others
            round = self._last_round()
        else:
            self._refuse_open_world()
            round = self._open_round() if me.id == 0 else self._find_round()
            self._refuse_open_world()  # again: of two that begin at once, one sees the other
        job = store.get(round)
        # Written before the others are read: of two workers that come back at once, one finds the
        # other. An earlier incarnation may have died at any step of its own rendezvous.
        size = 0 if is_again else self._world_size
        entry = RendezvousEntry(me.name, me.address, me.note, me.incarnation, size)
        store.set(f"{round}/{me.id}", msgspec.json.encode(entry).decode(), job)
        keys = [f"{round}/{other}" for other in range(self._world_size)]
        if is_again:
            self._wait(keys)
        else:
            self._wait_for_entries(round, keys, job)
        found = enumerate(_decode_entry(store.get(key, job)) for key in keys)
        members = [Member(id, e.name, e.address, e.incarnation, e.note) for id, e in found]
        directory = Directory(me.id, members)
        store.set(f"{round}/read/{me.id}", "", job)
        if me.id == 0 and not is_again:  # the host of the store must not go while others read
            self._wait([f"{round}/read/{other}" for other in range(self._world_size)])
        return Meeting(directory, job)

    def _refuse_open_world(self) -> None:
        if roster_in(self._store)[0].entries:
            raise UsageError(MIXED, hint="meet at another init_method")

    def _open_round(self) -> str:
        """Begin a new round, under a new job id."""
        round = f"gradwire/round {self._store.add(ROUNDS, 1)}"
        self._store.set(round, uuid.uuid4().hex)
        return round

    def _wait_for_entries(self, round: str, keys: list[str], job: str) -> None:
        """Wait until all ranks have written their entries, with the same world size."""
        try:
            if self._me.id == 0:
                self._wait(keys, look=lambda: self._check_sizes(keys, job))
            else:  # rank 0 writes its entry first, with the world size
                self._wait(keys[:1])
                self._check_sizes(keys[:1], job)
                self._wait(keys)
        except JoinTimeout:
            if self._me.id == 0:
                self._store.set(f"{round}/given up", "")  # so that no worker joins it later
                if self._store.add(ROUNDS, 0) > int(round.rsplit(" ", 1)[1]):
                    raise JoinTimeout(
                        f"{self._me.name} timed out: another process has opened a round here as "
                        "rank 0",
                        hint=_OWN_RANK,
                    ) from None
            raise
        self._check_sizes(keys, job)

    def _check_sizes(self, keys: list[str], job: str) -> None:
        """UsageError if an entry that is there has another world size."""
        for key in keys:
            text = None if key in self._checked else self._store.maybe_get(key, job)
            if text is None:
                continue
            other = _decode_entry(text)
            if other.world_size not in (0, self._world_size):
                raise UsageError(
                    f"{self._me.name} was given world_size={self._world_size}, {other.name} was "
                    f"given world_size={other.world_size}",
                    hint="give every worker the same world_size, or the same WORLD_SIZE",
                )
            self._checked.add(key)

    def _find_round(self) -> str:
        """The latest round in which this rank has not been."""
        id, n = self._me.id, max(1, self._store.add(ROUNDS, 0))
        while True:
            round = f"gradwire/round {n}"
            try:
                self._wait([round], missing="0")
            except JoinTimeout:
                before = f"gradwire/round {n - 1}"
                job = self._store.maybe_get(before)
                text = None if job is None else self._store.maybe_get(f"{before}/{id}", job)
                if text is None:
                    raise
                raise JoinTimeout(
                    f"{self._me.name} timed out: {_decode_entry(text).name} has joined as rank "
                    f"{id} before it, and rank 0 opens no other round",
                    hint=_OWN_RANK,
                ) from None
            claimed = self._store.add(f"{round}/claimed/{id}", 1) == 1
            if claimed and self._store.maybe_get(f"{round}/given up") is None:
                return round
            n += 1

    def _last_round(self) -> str:
        """The round that an earlier incarnation had joined, or was about to join."""
        n = self._store.add(ROUNDS, 0)
        if self._me.id == 0 and n == 0:
            return self._open_round()
        round = f"gradwire/round {max(1, n)}"
        if self._me.id == 0 and not self._store.has([round]):
            self._store.set(round, uuid.uuid4().hex)
        self._wait([round], missing="0")
        return round

    def _wait(
        self, keys: list[str], missing: str | None = None, look: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until all keys are set. `look` is called at each poll, and may end it by raising.

        On timeout the error lists the missing ranks, taken from the end of each unset key.
        """
        pause = _LOOK_AGAIN_SECONDS
        while not self._store.has(keys):
            look()
            left = self._deadline - self._clock.now()
            if left <= 0:
                unset = [key for key in keys if not self._store.has([key])]
                ranks = missing or ", ".join(key.rsplit("/", 1)[1] for key in unset)
                raise JoinTimeout(
                    f"{self._me.name} timed out waiting for rank {ranks} to join",
                    hint="start every rank, or increase Timeouts(join=…)",
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
