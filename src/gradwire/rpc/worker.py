"""Worker, which builds the layers of one worker, starts and stops them in order.

A process may have any number of workers.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast, final

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.agent import Agent
from gradwire.agent.devices.links import DeviceLinks
from gradwire.agent.devices.own import Drivers, drivers_of_this_process
from gradwire.agent.links.connections import Connections
from gradwire.agent.membership.open_world import Membership, RosterStore
from gradwire.agent.membership.shutdown import GracefulShutdown, ShutdownResult
from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret
from gradwire.agent.requests.promise import Deadline, deadline_from
from gradwire.agent.requests.timer import Clock, MonotonicClock
from gradwire.agent.serving.dispatch import Interceptor
from gradwire.autograd.engine import Engine
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, RefLeakWarning, UsageError
from gradwire.events import Events
from gradwire.ids import WorkerId
from gradwire.options import Options
from gradwire.rpc.actors.actor import Actor, unpacked_actor
from gradwire.rpc.behavior import NATIVE, Behavior
from gradwire.rpc.calls.client import Calls
from gradwire.rpc.calls.event_loop import EventLoop
from gradwire.rpc.calls.server import CallScope, CallServer
from gradwire.rpc.codec.body import BodyCodec
from gradwire.rpc.codec.codec import Codec
from gradwire.rpc.codec.pickle_codec import PickleCodec, sent_exception
from gradwire.rpc.expose.registry import Registry, exception_name
from gradwire.rpc.recompute.checkpoint_run import PROCESS, Generators, wrap_checkpoints
from gradwire.rpc.refs.handles_state import LentRef
from gradwire.rpc.refs.refs import Refs
from gradwire.rpc.rref import RRef
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener

_RREF_TAG = 64
_LENT_TAG = 65
_ACTOR_TAG = 66
_CLOSE_SECONDS = 1.0
"""How long shutdown waits for functions that still run, before it abandons their threads."""
_log = logging.getLogger("gradwire")

T = TypeVar("T")
Exposed = Iterable[ModuleType | Any]
NameToCall = Callable[[Callable[..., Any], WorkerId, float], str]
"""The name of a function for a call to a worker, which is there by a deadline."""


class OwnGenerator(NamedTuple):
    """The random generator of one worker, where a process has several workers."""

    generator: torch.Generator
    drawing: Callable[[], AbstractContextManager[object]]
    """the context manager in which random operators draw from it"""


_served_everywhere: list[Callable[[Worker], object]] = []


def serve_on_every_worker(part: Callable[[Worker], object]) -> None:
    """Make this `Worker.part` of each worker before it serves. For modules above this layer."""
    _served_everywhere.append(part)


@final
class Worker:
    """One member of the job: its agent, engine, references and calls, on top of each other."""

    has_program = True
    """whether its own program may still run; afterwards it only serves"""
    name_to_call: NameToCall | None = None
    """names the functions that this worker calls, if they are sent; see launch/definitions.py"""

    def __init__(
        self,
        directory: Directory,
        job: str,
        secret: Secret,
        transports: Transports,
        listener: Listener,
        options: Options,
        expose: Exposed = (),
        clock: Clock | None = None,
        store: Store | None = None,
        behavior: Behavior = NATIVE,
        refusals: Refusals | None = None,
        own: OwnGenerator | None = None,
        interceptor: Interceptor | None = None,
        roster: RosterStore | None = None,  # in an open world
        drivers: Drivers = drivers_of_this_process,
    ) -> None:
        current_worker.is_forked = False
        self._process = os.getpid()
        self.store, self.own = store, own
        """the rendezvous store, as this process may host it, and a random generator of its own"""
        self.directory, self.name = directory, directory.me.name
        self.behavior, self.options = behavior, options
        self.generators = PROCESS if own is None else Generators(own.generator)
        self._parts: dict[object, object] = {}
        self._parts_lock = threading.RLock()  # making a part may ask for another
        self.leaks: list[str] = []
        """values of this worker that were still referenced by peers when all had left"""
        self.refusals = refusals or Refusals()
        """what was refused here, by kind"""
        place, clock = (directory, job, secret, transports, listener), clock or MonotonicClock()
        self.events = Events(clock.now)
        connections = Connections(*place, options, clock, self.refusals)
        below, registry = (directory, connections, clock, self.events, options), Registry(expose)
        self.agent = Agent(
            *below,
            type_of=sent_exception if behavior.pickle else registry.exception_type,
            name_of=exception_name,
            refusals=self.refusals,
            interceptor=interceptor,
        )
        self._serve(registry, roster, drivers)

    def _serve(self, registry: Registry, roster: RosterStore | None, drivers: Drivers) -> None:
        """Build the layers above the agent, which register the messages that they serve; start."""
        self.before_close: list[Callable[[], object]] = []
        """what layers above stop before the worker does"""
        self._graceful_shutdown: GracefulShutdown | Membership = (
            GracefulShutdown(self.agent) if roster is None else Membership(self.agent, roster)
        )
        agent, options, behavior = self.agent, self.options, self.behavior
        timeouts, clock, scope_for = options.timeouts, agent.clock, partial(CallScope, self)
        self.deadline: Deadline = partial(deadline_from, clock, timeouts.call)
        self.backward_deadline: Deadline = partial(deadline_from, clock, timeouts.backward)
        self.step_deadline: Deadline = partial(deadline_from, clock, timeouts.step)
        self.devices = DeviceLinks(agent, drivers, needs_map=behavior.needs_device_map)
        self.engine = Engine(
            agent,
            self.devices,
            timeouts,
            scope_for,
            self.backward_deadline,
            edge_per_message=behavior.edge_per_message,
            only_in_contexts=behavior.leaves_outside_contexts,
        )
        reference = behavior.reference or RRef
        self.refs: Refs = Refs(agent, partial(reference._of, self))
        codec = self._codec(registry, reference)
        bodies = self.bodies = BodyCodec(codec, self.engine, self.refs, behavior)
        maps = options.device_maps
        self.calls = Calls(agent, self.engine, self.refs, bodies, behavior, maps)
        self.registry, self.server = registry, CallServer(self, bodies, registry)
        if not behavior.pickle:
            self.server.begin_task = self.part(EventLoop).begin
        for part in (*behavior.parts, *_served_everywhere):
            self.part(part)
        agent.start(lambda: self.engine.contexts.opened)

    def _codec(self, registry: Registry, reference: type[RRef[Any]]) -> Codec | PickleCodec:
        """The codec of values. Pickles are used only if the options or compat ask for them."""
        refs, options, behavior = self.refs, self.options, self.behavior
        pickles = None
        if behavior.pickle or options.pickle:
            restores = behavior.leaves_outside_contexts
            pickles = PickleCodec(behavior.reducers, restores_parameters=restores)
        data = Codec(registry, options.limits, pickles)
        for codec in (data, pickles):
            if codec is not None:
                codec.extend(reference, _RREF_TAG, reference._pack, refs.unpacked)
                codec.extend(Actor, _ACTOR_TAG, Actor._pack, partial(unpacked_actor, self))
                codec.extend(LentRef, _LENT_TAG, LentRef.pack, refs.borrowed)
        return pickles if behavior.pickle and pickles is not None else data

    def __repr__(self) -> str:
        return f"<Worker {self.name}>"

    def announce(self, deadline: float) -> None:
        """In an open world, tell the others that this worker has joined."""
        if isinstance(self._graceful_shutdown, Membership):
            self._graceful_shutdown.announce(deadline)

    def part(self, kind: Callable[[Worker], T]) -> T:
        """The object that a layer above keeps for each worker; made on first use."""
        with self._parts_lock:
            if kind not in self._parts:
                self._parts[kind] = kind(self)
            return cast(T, self._parts[kind])

    def maybe_part(self, kind: Callable[[Worker], T]) -> T | None:
        """The same, or None if nobody has used it."""
        return cast(T | None, self._parts.get(kind))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Code in the block belongs to this worker."""
        with current_worker.use(self), nullcontext() if self.own is None else self.own.drawing():
            yield

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the worker's."""
        return os.getpid() != self._process

    def shutdown(self, *, graceful: bool, timeout: float | None = None) -> list[str]:
        """Leave, together with the others if graceful; return the names of workers that were lost.

        The timeout begins when every program has ended; until then this worker serves. If a worker
        does not leave in time, everything is closed and DeadlinePassed is raised.

        In a forked process, which shares the worker's connections, this does nothing.
        """
        if self.is_forked:
            return []
        if self.agent.dispatch.user.runs_this_thread:
            raise UsageError(
                f"shutdown() was called on {self.name} by a function that a peer called",
                hint="let the function return, and call shutdown() from the program itself",
            )
        seconds = self.options.timeouts.shutdown if timeout is None else timeout
        if not 0 < seconds < math.inf:
            raise UsageError(f"timeout={timeout!r} is not a positive, finite number of seconds")
        parted = ShutdownResult([], [], [])
        try:
            if graceful:
                parted = self.leave(seconds, self.refs.abandon)
        finally:  # also after an interrupt: nothing else would close it
            self.close(_CLOSE_SECONDS)
        if self.leaks:
            warnings.warn(
                f"{self.name} shut down while references to its values were still counted: "
                f"{', '.join(self.leaks)}",
                RefLeakWarning,
                stacklevel=3,
            )
        if parted.late:
            behind = ", ".join(parted.behind)
            also = f"; {behind} had not left either, and may have waited for it" if behind else ""
            raise DeadlinePassed(
                f"{self.name} shut down without {', '.join(parted.late)}, which did not shut down "
                f"within {seconds:g} s after the last program was over{also}",
                hint="a longer shutdown(timeout=…) or Timeouts(shutdown=…) waits longer",
            ).about(parted.late[0], phase="shutdown")
        return parted.lost

    def serve_until_over(self, caller: WorkerId, seconds: float) -> bool:
        """In a closed world, serve until the program of one worker, restarted or not, has ended.

        False if it does not end within this time.
        """
        assert isinstance(self._graceful_shutdown, GracefulShutdown), (
            "an open world has nobody to wait for"
        )
        self.has_program = False
        return self._graceful_shutdown.wait_until_over(caller, self.agent.clock.now() + seconds)

    def leave(self, seconds: float, let_go: Callable[[], None]) -> ShutdownResult:
        """Announce the leave and serve until all leave; `let_go` runs once all programs ended."""
        if self.is_forked:
            return ShutdownResult([], [], [])

        def let_all_go() -> None:
            self.engine.releases.stop()
            let_go()

        self.has_program = False
        return self._graceful_shutdown.leave(seconds, let_all_go, self._is_busy, self._find_leaks)

    def close(self, seconds: float = 5.0) -> None:
        """Stop now. Waits for peers raise. Idempotent; does nothing in a forked process."""
        if self.is_forked:
            return
        for stop in self.before_close:
            stop()
        self._graceful_shutdown.close()  # first: it tries again on threads that the agent joins
        self.engine.stop(f"{self.name} was shut down")
        stuck = self.agent.close("shutdown() was called", seconds)
        self.part(EventLoop).close()
        self.devices.close()
        self.refs.close()
        self.store = None
        if stuck:
            _log.warning("%s shut down while these still ran: %s", self.name, ", ".join(stuck))

    def _find_leaks(self) -> None:
        self.leaks = self.refs.leaks()
        self.engine.report_leaks()

    def _is_busy(self) -> bool:
        agent, tasks = self.agent, self.part(EventLoop).active
        return bool(agent.in_flight or agent.dispatch.active or tasks or self.refs.pending)


wrap_checkpoints()
