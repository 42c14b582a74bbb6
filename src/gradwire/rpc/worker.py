"""One worker: builds the layers, starts and stops them in order.

Any number of them live in one process. Nothing below knows of this file.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar, final

from gradwire.agent.agent import Agent
from gradwire.agent.clock import Clock, MonotonicClock
from gradwire.agent.connections import Connections
from gradwire.agent.departure import Leaver
from gradwire.agent.directory import Directory
from gradwire.autograd import api as autograd_api
from gradwire.autograd.engine import Engine
from gradwire.autograd.scope import inside as inside_context
from gradwire.errors import RefLeakWarning, UsageError
from gradwire.events import Events
from gradwire.ids import ContextId
from gradwire.options import Options
from gradwire.rpc.calls import Calls
from gradwire.rpc.manner import NATIVE, Manner
from gradwire.rpc.parcels import Parcels
from gradwire.rpc.parts import Parts
from gradwire.rpc.payload import Codec
from gradwire.rpc.refs import Refs
from gradwire.rpc.registry import Registry, exception_name
from gradwire.rpc.rref import RRef, home_door
from gradwire.rpc.scope import deadline_from, due
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener

_CLOSE_SECONDS = 1.0
"""What running functions get to end before their threads are left to themselves."""
_log = logging.getLogger("gradwire")

T = TypeVar("T")
Exposed = Iterable[ModuleType | Any]


@final
class Worker:
    """See the top of this file."""

    def __init__(
        self,
        directory: Directory,
        job: str,
        transports: Transports,
        listener: Listener,
        options: Options,
        expose: Exposed = (),
        clock: Clock | None = None,
        store: object = None,
        manner: Manner = NATIVE,
    ) -> None:
        self._store = store  # held, as we may be the one who hosts it
        self.directory = directory
        self.name = directory.me.name
        self._options = options
        self._parts: Parts[Worker] = Parts()
        clock = clock or MonotonicClock()
        registry = Registry(expose)
        self.events = Events(self.name)
        connections = Connections(directory, job, transports, listener, options.timeouts, clock)
        self.agent = Agent(
            directory,
            connections,
            clock,
            self.events,
            threads=options.threads,
            limits=options.limits,
            type_of=registry.exception_type,
            name_of=exception_name,
        )
        self._leaver = Leaver(self.agent)
        self.engine = Engine(
            self.agent,
            options.timeouts,
            self._inside_context,
            edge_per_message=manner.edge_per_message,
        )
        self.refs = Refs(self.agent)
        self.refs.make = lambda hold: RRef._of(self, hold)
        codec = Codec(registry, options.limits)
        codec.extend(RRef, _RREF_TAG, lambda rref: self.refs.pack(rref.hold), self.refs.unpacked)
        parcels = Parcels(codec, self.engine, self.refs)
        self.calls = Calls(self.agent, self.engine, self.refs, parcels, registry, self._serving)
        self.agent.start()

    def __repr__(self) -> str:
        return f"<Worker {self.name}>"

    def backward_deadline(self) -> float:
        """The moment a backward pass that begins now is given up."""
        return deadline_from(None, self._options.timeouts.backward, self.agent.clock.now())

    def step_deadline(self) -> float:
        """The moment a step of an optimizer that begins now is given up."""
        return deadline_from(None, self._options.timeouts.step, self.agent.clock.now())

    def deadline(self, timeout: float | None) -> float:
        """The moment a call that begins now must be answered."""
        return deadline_from(timeout, self._options.timeouts.call, self.agent.clock.now())

    def part(self, kind: Callable[[Worker], T]) -> T:
        """What a layer above keeps for each worker: made when it is first asked for."""
        return self._parts.of(self, kind)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Code in the block belongs to this worker."""
        with home_door.opened(self), autograd_api.door.opened(self.engine):
            yield

    def shutdown(self, *, graceful: bool, timeout: float | None = None) -> list[str]:
        """Leave, with the others if graceful; the workers that were given up on."""
        if self.agent.dispatch.user.runs_this_thread:
            raise UsageError(
                f"shutdown() was called on {self.name} by a function that a peer called",
                hint="let the function return, and call shutdown() from the program itself",
            )
        seconds = self._options.timeouts.shutdown if timeout is None else timeout
        limit = self.agent.clock.now() + seconds
        gave_up: list[str] = []
        leaks: list[str] = []
        try:
            if graceful:
                gave_up = self._leaver.leave(limit, self.refs.abandon, self._is_busy)
                leaks = self.refs.leaks()
        finally:  # also if we were interrupted: what is left would be left for ever
            left = limit - self.agent.clock.now()
            self.close(max(_CLOSE_SECONDS, left) if graceful else _CLOSE_SECONDS)
        if leaks:
            warnings.warn(
                f"{self.name} shut down while references to its values were still counted: "
                f"{', '.join(leaks)}",
                RefLeakWarning,
                stacklevel=3,
            )
        return gave_up

    def close(self, seconds: float = 5.0) -> None:
        """Stop now. What waits for a peer gets an error; idempotent."""
        self.engine.stop(f"{self.name} was shut down")
        stuck = self.agent.close("shutdown() was called", seconds)
        self.refs.close()
        if stuck:
            _log.warning("%s shut down while these still ran: %s", self.name, ", ".join(stuck))

    def _is_busy(self) -> bool:
        return bool(self.agent.in_flight or self.agent.dispatch.active or self.refs.pending)

    @contextmanager
    def _inside_context(self, context: ContextId) -> Iterator[None]:
        with self.scope(), inside_context(context, self.engine.saving):
            yield

    @contextmanager
    def _serving(self, context: ContextId | None, deadline: float) -> Iterator[None]:
        with self.scope(), inside_context(context, self.engine.saving), due(deadline):
            yield


_RREF_TAG = 64
