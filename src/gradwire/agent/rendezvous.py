"""How workers learn each other's names and addresses: through one of torch's stores.

Each writes its own entry and reads the others'. The store is needed only to join; its host keeps it
open until it leaves.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gradwire.agent.clock import Clock
from gradwire.agent.directory import Directory, WorkerInfo
from gradwire.errors import JoinTimeout, UsageError
from gradwire.options import Options

_NAME = re.compile(r"[A-Za-z0-9\-_:]{1,127}")


class Entry(msgspec.Struct, frozen=True):
    """What a worker says of itself."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Meeting:
    """Everyone has arrived. `store` is held by whoever hosts it."""

    directory: Directory
    job: str
    store: Store


def check_name(name: str) -> None:
    """Refuse names that could not be spoken in an address or a trace."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and "
            f"shorter than 128 chars, but got {name}"
        )


def open_store(options: Options, rank: int, world_size: int) -> Store:
    """The store that `init_method` names."""
    seconds = timedelta(seconds=options.timeouts.join)
    url = options.init_method
    try:
        found = rendezvous(url, rank=rank, world_size=world_size, timeout=seconds)
        store, _, _ = next(iter(found))
    except ValueError as error:
        raise UsageError(
            f"no rendezvous at {url}: {error}",
            hint="init_method is env:// (MASTER_ADDR, MASTER_PORT), tcp://host:port or file:///path",
        ) from None
    except RuntimeError as error:
        raise JoinTimeout(f"no rendezvous at {url}: {error}") from None
    return store  # type: ignore[no-any-return]


def meet(
    store: Store,
    name: str,
    address: str,
    rank: int,
    world_size: int,
    options: Options,
    clock: Clock,
) -> Meeting:
    """Tell the others where we are, and wait until all have done so."""
    generation = store.add(f"gradwire/joins/{rank}", 1)
    prefix = f"gradwire/{generation}"
    limit = clock.now() + options.timeouts.join
    if rank == 0:
        store.set(f"{prefix}/job", uuid.uuid4().hex)
    store.set(f"{prefix}/{rank}", msgspec.json.encode(Entry(name, address)).decode())
    keys = [f"{prefix}/{other}" for other in range(world_size)]
    _wait(store, [*keys, f"{prefix}/job"], limit - clock.now(), name)
    entries = [msgspec.json.decode(store.get(key), type=Entry) for key in keys]
    members = [(WorkerInfo(e.name, id), e.address) for id, e in enumerate(entries)]
    directory = Directory(rank, members)
    job = store.get(f"{prefix}/job").decode()
    store.set(f"{prefix}/read/{rank}", "")
    if rank == 0:  # the host of the store must not go while others read
        read = [f"{prefix}/read/{other}" for other in range(world_size)]
        _wait(store, read, limit - clock.now(), name)
    return Meeting(directory, job, store)


def _wait(store: Store, keys: list[str], seconds: float, name: str) -> None:
    try:
        store.wait(keys, timedelta(seconds=max(0.001, seconds)))
    except RuntimeError:
        missing = [key for key in keys if not store.check([key])]
        ranks = ", ".join(key.rsplit("/", 1)[1] for key in missing)
        raise JoinTimeout(
            f"{name} waited in vain for rank {ranks} to join",
            hint="start every rank, or a longer Timeouts(join=…) waits longer",
        ) from None
