"""Names: the values of one worker that were given a name, and who waits for one.

Note [Where a name is kept]: on the owner of its value, and nowhere else. So there is no central
point: a name ends with its worker or with the last reference, and needs no message for that. A name
holds no reference itself. The price is that `lookup("ps")` asks every worker, and that two workers
may have the same name; `lookup("w1:ps")` asks one.

An owner answers when it has the name: a lookup that waits is a task of its event loop, which ends
with the call that it serves.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, final

from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.ids import RefId
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.actors.actor import Actor
from gradwire.rpc.calls.client import Target
from gradwire.rpc.expose.registry import expose, name_of
from gradwire.rpc.rref import RRef

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

_LONGEST = 200


def check_name(name: object) -> None:
    """UsageError unless it may be the name of a value."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST or ":" in name:
        raise UsageError(
            f"{name!r:.80} cannot be the name of a value",
            hint=f"a name is text of 1 to {_LONGEST} characters, without a colon",
        )


class NamedValue(NamedTuple):
    """What a name stands for: a value of this worker; of an actor, its max_concurrency."""

    ref: RefId
    most: int


@final
class Names:
    """The names of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        self._named: dict[str, NamedValue] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        worker.agent.locks.add(self._lock)

    def give(self, name: str, rref: RRef[Any], most: int) -> None:
        """Name a value of this worker; UsageError if another has the name."""
        me = self._worker.name
        if not rref.is_owner():
            raise UsageError(f"{name!r} is to name a value that {me} does not own")
        if self.maybe(name) is not None:
            raise UsageError(
                f"{me} has a value named {name!r} already",
                hint="a name is free again when the last reference to its value is gone",
            )
        with self._lock:
            self._named[name] = NamedValue(rref.handle.ref, most)
            waiting = self._waiting.pop(name, ())
        for waiter in waiting:
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    def maybe(self, name: str) -> RRef[Any] | Actor[Any] | None:
        """What has this name now."""
        with self._lock:
            named = self._named.get(name)
            handle = None
            if named is not None:
                handle = self._worker.refs.piggybacked.maybe_handle(named.ref)
                if handle is None:  # its last reference is gone
                    del self._named[name]
        if named is None or handle is None:
            return None
        rref: Any = self._worker.refs.make(handle)
        return Actor(rref, named.most) if named.most else rref

    async def find(self, name: str) -> RRef[Any] | Actor[Any]:
        """What has this name, once something has."""
        loop = asyncio.get_running_loop()
        while True:
            waiter = loop.create_future()
            with self._lock:
                self._waiting.setdefault(name, set()).add(waiter)
            try:
                if (found := self.maybe(name)) is not None:  # after it was added: none is missed
                    return found
                await waiter
            finally:
                self._forget(name, waiter)

    def _forget(self, name: str, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(name)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiting[name]


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@expose
def give_name(name: str, rref: RRef[Any], most: int) -> None:
    """Name a value of this worker."""
    check_name(name)
    if not isinstance(rref, RRef) or type(most) is not int or most < 0:
        raise UsageError(f"{name!r} was to name a {type(rref).__name__}, which is no reference")
    names: Names = current_worker.find().part(Names)
    names.give(name, rref, most)


@expose
async def find_name(name: str) -> RRef[Any] | Actor[Any]:
    """What has this name on this worker, once something has."""
    check_name(name)
    names: Names = current_worker.find().part(Names)
    return await names.find(name)


def name_value(name: str, rref: RRef[Any], most: int = 0, timeout: Timeout = DEFAULT) -> None:
    """Give a value a name on its owner; wait until it has it. `most` is that of an actor."""
    check_name(name)
    worker: Worker = current_worker.find()
    target = Target(name_of(give_name), (name, rref, most), {}, f"naming {name!r}")
    worker.calls.call(rref.handle.owner, target, worker.deadline(timeout))
