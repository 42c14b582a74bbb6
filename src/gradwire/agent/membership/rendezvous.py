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
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, final
from urllib.parse import urlparse, urlunparse

import msgspec
from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gradwire.agent.peers.directory import Directory, Member, Roster
from gradwire.agent.peers.secret import Secret, SignedStore, read_shared
from gradwire.agent.requests.timer import Clock
from gradwire.errors import GradwireError, JoinTimeout, PeerLost, UsageError
from gradwire.options import Options, rendezvous_server, store_of_launcher

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


def _name(n: int) -> str:
    return f"gradwire/round {n}"


def _go(round: str) -> str:
    """All entries, written by rank 0 when they are there."""
    return f"{round}/go/0"


def _given_up(round: str) -> str:
    return f"{round}/given up"


def _offer(round: str) -> str:
    """The path of the secret, if rank 0 has made one. Not signed: see `read_shared`."""
    return f"{round}/secret"


class RendezvousEntry(msgspec.Struct, frozen=True):
    """What a worker writes about itself, with the world size that it was given."""

    name: str
    address: str
    note: str = ""
    incarnation: int = 0
    world_size: int = 0


_decode_entry = msgspec.json.Decoder(RendezvousEntry).decode
_decode_entries = msgspec.json.Decoder(list[RendezvousEntry]).decode


class Meeting(NamedTuple):
    """The result of a rendezvous. Keep the store, as this process may host it."""

    directory: Directory
    job: str


def open_store(
    options: Options,
    rank: int | None,
    world_size: int | None,
    *,
    is_again: bool = False,
    deadline: float | None = None,
) -> Store:
    """The store that `init_method` names; without a world size, for any number of workers.

    `is_again`: this process has joined here before. Then rank 0's earlier store may still listen at
    this port, so a taken port is tried again.
    """
    url = options.init_method
    if urlparse(url).scheme not in ("env", "tcp", "file"):
        raise UsageError(f"no rendezvous at {url}", hint=_PLACES)
    if (agent := store_of_launcher(url)) is not None:
        raise UsageError(
            f"no rendezvous at {url}: processes of torchrun host no store, as its agent hosts "
            f"one at {agent}",
            hint="leave init_method out, or env://",
        )
    if deadline is None:
        deadline = time.monotonic() + options.timeouts.join
    pause = _LOOK_AGAIN_SECONDS
    _await_server(url, rank, deadline)
    while True:
        seconds = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            found = rendezvous(_numbered(url, rank, world_size), timeout=seconds)
            return next(iter(found))[0]  # type: ignore[no-any-return]
        except ValueError as error:
            raise UsageError(f"no rendezvous at {url}: {error}", hint=_PLACES) from error
        except RuntimeError as error:
            if not is_again or time.monotonic() >= deadline:
                raise _no_store(url, error) from error
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_LOOK_AGAIN_SECONDS)  # torch warns each time


def _no_store(url: str, error: RuntimeError) -> GradwireError:
    if _PORT_IS_TAKEN in str(error).lower():
        text = f"no rendezvous at {url}: something else listens at its port"
        return UsageError(text, hint=_ANOTHER)
    return JoinTimeout(f"no rendezvous at {url}: {error}")


def await_name(host: str, deadline: float) -> None:
    """Wait until the name of a host is known: that of a pod may not be for half a minute."""
    pause = _LOOK_AGAIN_SECONDS
    while host:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise JoinTimeout(
                    f"the name of rendezvous host {host} is not known: {error}",
                    hint="correct it, or increase Timeouts(join=…)",
                ) from error
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_LOOK_AGAIN_SECONDS)


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


def meet(store: SignedStore, me: Member, world_size: int, deadline: float, clock: Clock) -> Meeting:
    """Write this worker's entry, and wait for the entries of all others.

    A store without a secret is given that of each round, which rank 0 has made on this machine.
    """
    rounds = _Rounds(store, me, world_size, deadline, clock)
    try:
        return rounds.rejoin() if me.incarnation else rounds.meet()
    except DistNetworkError as error:
        raise StoreLost(
            "the rendezvous store was lost before every worker had joined: the process that "
            "hosts it, usually rank 0, has exited",
            hint=f"see that process's output for the cause; {_OWN_RANK}",
        ) from error


class StoreLost(PeerLost):
    """The process that hosts the rendezvous store has ended."""


class _RoundIsOver(Exception):  # no error: the worker looks for the next round
    """Rank 0 has given up the round, or another process of rank 0 has opened a later one."""


@final
class _Rounds:
    """The rounds of joining in one store, which may be used again after a shutdown or a failure.

    Rank 0 opens a round, and says `go` when the entries of all are there. The others join the
    latest round in which no worker of their rank has been. They move on to a later one as long as
    rank 0 has not said `go`. A launcher may keep the store when it restarts all processes, so a
    round may be one of processes that were killed: there nobody says `go` any more.
    """

    def __init__(
        self, store: SignedStore, me: Member, world_size: int, deadline: float, clock: Clock
    ) -> None:
        self._store, self._me, self._world_size = store, me, world_size
        self._deadline, self._clock = deadline, clock
        self._checked: set[str] = set()  # entries whose world size was compared and is the same
        self._is_secret_shared = store.secret is None

    def meet(self) -> Meeting:
        """Join a round of new workers."""
        if not self._is_secret_shared:
            self._refuse_open_world()
        if self._me.id == 0:
            round = self._open_round()
            self._refuse_open_world()  # again: of two that begin at once, one sees the other
            return self._lead(round)
        n = max(1, self._store.add(ROUNDS, 0))
        while True:
            n = self._claim_round(n)
            with suppress(_RoundIsOver):
                return self._follow(n)
            n = max(n + 1, self._store.add(ROUNDS, 0))

    def rejoin(self) -> Meeting:
        """Join the round of an earlier incarnation, without the help of the others."""
        round = self._last_round()
        job = self._store.get(round)
        # Written before the others are read: of two workers that come back at once, one finds the
        # other. An earlier incarnation may have died at any step of its own rendezvous.
        keys = self._write_entry(round, job, world_size=0)
        self._wait(keys)
        entries = self._read_entries(keys, job)
        if self._me.id == 0 and not self._store.has([_go(round)]):  # it died before it said so
            self._say_go(round, entries, job)
        return self._met(round, entries, job)

    def _lead(self, round: str) -> Meeting:
        """As rank 0, which may host the store, and must not go while the others read."""
        job = self._store.get(round)
        keys = self._write_entry(round, job, self._world_size)
        try:
            self._wait(keys, look=lambda: self._check_sizes(keys, job))
        except JoinTimeout:
            self._give_up(round)
            raise
        self._check_sizes(keys, job)
        entries = self._read_entries(keys, job)
        self._say_go(round, entries, job)
        meeting = self._met(round, entries, job)
        self._wait([f"{round}/read/{other}" for other in range(self._world_size)])
        return meeting

    def _follow(self, n: int) -> Meeting:
        """As any other rank."""
        round = _name(n)

        def look() -> None:
            is_given_up = self._store.maybe_get(_given_up(round)) is not None
            if is_given_up or self._store.add(ROUNDS, 0) > n:
                raise _RoundIsOver

        if self._is_secret_shared:
            self._store.secret = self._shared_secret(round)
        look()
        self._refuse_open_world()
        job = self._store.get(round)
        keys = self._write_entry(round, job, self._world_size)
        self._wait(keys[:1], look=look)  # rank 0 writes its entry first, with the world size
        self._check_sizes(keys[:1], job)
        self._wait([_go(round)], look=look, then=keys)
        return self._met(round, _decode_entries(self._store.get(_go(round), job)), job)

    def _shared_secret(self, round: str) -> Secret:
        """The secret that rank 0 has made on this machine for this round."""
        if not self._store.has([_offer(round)]):
            raise UsageError(
                f"{self._me.name} was given no secret, but rank 0 was",
                hint="set GRADWIRE_SECRET_FILE for every process, or for none",
            )
        try:
            return read_shared(self._store.inner.get(_offer(round)).decode())
        except FileNotFoundError:  # of processes that have ended
            raise _RoundIsOver from None

    def _write_entry(self, round: str, job: str, world_size: int) -> list[str]:
        """Write this worker's entry; returns the names of all."""
        me = self._me
        entry = RendezvousEntry(me.name, me.address, me.note, me.incarnation, world_size)
        self._store.set(f"{round}/{me.id}", msgspec.json.encode(entry).decode(), job)
        return [f"{round}/{other}" for other in range(self._world_size)]

    def _read_entries(self, keys: list[str], job: str) -> list[RendezvousEntry]:
        return [_decode_entry(self._store.get(key, job)) for key in keys]

    def _say_go(self, round: str, entries: list[RendezvousEntry], job: str) -> None:
        """Write all entries as one value, so that n workers do not read n entries each."""
        self._store.set(_go(round), msgspec.json.encode(entries).decode(), job)

    def _met(self, round: str, entries: list[RendezvousEntry], job: str) -> Meeting:
        members = [
            Member(id, e.name, e.address, e.incarnation, e.note) for id, e in enumerate(entries)
        ]
        directory = Directory(self._me.id, members)
        self._store.set(f"{round}/read/{self._me.id}", "", job)
        return Meeting(directory, job)

    def _refuse_open_world(self) -> None:
        if roster_in(self._store)[0].entries:
            raise UsageError(MIXED, hint="meet at another init_method")

    def _open_round(self) -> str:
        """Begin a new round, under a new job id."""
        round = _name(self._store.add(ROUNDS, 1))
        if self._store.offered is not None:
            self._store.inner.set(_offer(round), self._store.offered)
        self._store.set(round, uuid.uuid4().hex)
        return round

    def _give_up(self, round: str) -> None:
        """Let no worker join the round later."""
        self._store.set(_given_up(round), "")
        if self._store.add(ROUNDS, 0) > int(round.rsplit(" ", 1)[1]):
            raise JoinTimeout(
                f"{self._me.name} timed out: another process has opened a round here as rank 0",
                hint=_OWN_RANK,
            ) from None

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

    def _claim_round(self, n: int) -> int:
        """The first round from the nth on in which no worker of this rank has been."""
        while True:
            try:
                self._wait([_name(n)], missing="0")
            except JoinTimeout:
                self._report_taken_rank(_name(n - 1))
                raise
            if self._store.add(f"{_name(n)}/claimed/{self._me.id}", 1) == 1:
                return n
            n += 1

    def _report_taken_rank(self, round: str) -> None:
        """Raise JoinTimeout if another process has joined the last round as this rank."""
        if self._is_secret_shared or not self._store.has([round]):
            return
        text = self._store.maybe_get(f"{round}/{self._me.id}", self._store.get(round))
        if text is not None:
            raise JoinTimeout(
                f"{self._me.name} timed out: {_decode_entry(text).name} has joined as rank "
                f"{self._me.id} before it, and rank 0 opens no other round",
                hint=_OWN_RANK,
            ) from None

    def _last_round(self) -> str:
        """The round that an earlier incarnation had joined, or was about to join."""
        n = self._store.add(ROUNDS, 0)
        if self._me.id == 0 and n == 0:
            return self._open_round()
        round = _name(max(1, n))
        if self._me.id == 0 and not self._store.has([round]):
            self._store.set(round, uuid.uuid4().hex)
        self._wait([round], missing="0")
        return round

    def _wait(
        self,
        keys: list[str],
        missing: str | None = None,
        look: Callable[[], None] = lambda: None,
        then: Sequence[str] = (),
    ) -> None:
        """Wait until all keys are set. `look` is called at each poll, and may end it by raising.

        On timeout the error lists the missing ranks, taken from the end of each unset key; of
        `then`, if these are the keys that another rank waits for.
        """
        pause = _LOOK_AGAIN_SECONDS
        while not self._store.has(keys):
            look()
            left = self._deadline - self._clock.now()
            if left <= 0:
                unset = [key for key in then or keys if not self._store.has([key])] or keys
                ranks = missing or ", ".join(key.rsplit("/", 1)[1] for key in unset)
                raise JoinTimeout(
                    f"{self._me.name} timed out waiting for rank {ranks} to join",
                    hint="start every rank, or increase Timeouts(join=…)",
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
