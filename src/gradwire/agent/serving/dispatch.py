"""Finds the handler of a message, and runs it in its lane.

control   at once, on the thread that reads: may not block, send or run user code
service   on an unbounded thread pool: may block and send; never waits behind user code
user      on the elastic pool

If requests of a kind were fast recently, the thread that reads one runs its handler itself instead
of queueing it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, final

import msgspec

from gradwire.agent.requests.ends import Ends
from gradwire.agent.serving.peer_limits import EACH, PeerLimit
from gradwire.agent.serving.thread_pool import ElasticPool, Job, mine
from gradwire.errors import BadMessage, OverLimit
from gradwire.events import Events
from gradwire.ids import WorkerId
from gradwire.options import Options
from gradwire.threads import leave_fork
from gradwire.transport.base import Channel
from gradwire.wire.message import Frame, Kinds, Message, kind_of

M = TypeVar("M", bound=Message)

_SHORT_SECONDS = 0.003
_WEIGHT = 0.3
_MOST_KNOWN = 4096


class Lane(Enum):
    """Where a handler runs."""

    CONTROL = "control"
    SERVICE = "service"
    USER = "user"


class Source(msgspec.Struct, eq=False):
    """The origin of an inbound message: what `Agent.answer` needs to send the answer back."""

    worker: WorkerId
    channel: Channel
    request: int
    cancelled: str = ""  # why nobody waits for the answer any more, once that is so; user lane only
    note: bytes = b""  # what the layer above sends along with the answer or the failure
    device_map: dict[str, str] | None = None  # the peer's; see devices/maps.py
    in_pass: bool = False  # see rpc/messages.py, Call
    answered: bool = False  # only while events are recorded
    is_kept: bool = False  # whether the caller has a reference to the result: it is not cancelled
    about: object = None  # the latency key of the message, which names what runs
    began: float = 0.0  # when its handler was entered, on the clock of `time.monotonic`; 0: queued
    on_cancelled: Callable[[str], None] | None = None
    # ends what goes on for it in the event loop; it must not block


Payload = memoryview | None
Handler = Callable[[M, Payload, Source], object]
OnError = Callable[[Source, BaseException], None]


@final
class LatencyEstimate:
    """How long each kind of request took lately. One that was never seen is not short."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}

    def is_short(self, key: Hashable) -> bool:
        """Whether to run it without handing it to another thread."""
        return self._seconds.get(key, 1.0) < _SHORT_SECONDS

    def took(self, key: Hashable, seconds: float) -> None:
        """Record that it ran for so long."""
        before = self._seconds.get(key)
        if before is None:
            if len(self._seconds) >= _MOST_KNOWN:  # peers choose the names: bound their number
                self._seconds.clear()
            self._seconds[key] = seconds
        else:
            self._seconds[key] = before + _WEIGHT * (seconds - before)


class Registered(NamedTuple):
    """The handler of a message type; see `Dispatch.handle`."""

    handler: Callable[[Message, Payload, Source], object]
    pool: ElasticPool | None  # that of its lane; None for the control lane
    latency_key: Callable[[Message], Hashable]
    refuse: Callable[[Message, Source], None]


Run = Callable[..., None]


class Interceptor(Protocol):
    """Stands in the way of each message of a worker; see testing/failpoints.py."""

    def send(self, to: WorkerId, channel: Channel, frame: Frame, deadline: float) -> None:
        """Send a frame, in place of `channel.send`."""

    def around(self, frame: Frame, registered: Registered, run: Run) -> tuple[Registered, Run]:
        """The replacements for the handler of a frame, and for `Dispatch._run` around it."""

    def take_answer(self, take: Run, worker: WorkerId, channel: Channel, frame: Frame) -> None:
        """Take an answer, in place of `take(worker, frame)`."""


def payload_of(frame: Frame) -> Payload:
    """The one block of an inbound frame that has one."""
    (block,) = frame.payload
    assert isinstance(block, memoryview)
    return block


@final
class Dispatch:
    """The handlers of one worker, and the two pools that run them."""

    def __init__(
        self, kinds: Kinds, name: str, options: Options, on_error: OnError, events: Events
    ) -> None:
        self.limits, most_unserved = options.limits, options.limits.unserved
        self._kinds, self._on_error, self._events = kinds, on_error, events
        self._most_unserved = most_unserved
        self._unserved = PeerLimit("unserved", most_unserved, one_may_exceed=True)
        self._registered: dict[int, Registered] = {}
        self._latency = LatencyEstimate()
        self._surroundings: Callable[[], AbstractContextManager[object]] | None = None
        self.is_forked = False
        """whether this process was forked from the worker"""
        self.inbound_requests: set[Source] = set()
        """those in the user lane that are queued or run; all but kept ones can be cancelled"""
        self.outlasting: set[Source] = set()
        """those of them that go on in the event loop when their handler has returned"""
        self.served = Ends()
        """how the calls of peers have ended"""
        self.user = ElasticPool(f"gradwire {name} user", options.threads)
        self.service = ElasticPool(f"gradwire {name} service")

    def handle(
        self,
        message_type: type[M],
        handler: Handler[M],
        lane: Lane,
        latency_key: Callable[[M], Hashable] = type,
        refuse: Callable[[M, Source], None] = lambda *_: None,
    ) -> None:
        """Register the handler of a message type. What it raises is sent back as the answer.

        Messages with the same latency key share one latency estimate. A message whose request is
        cancelled before it runs is given to `refuse`, to release what it holds.
        """
        self._kinds.add(message_type)
        pool = {Lane.CONTROL: None, Lane.SERVICE: self.service, Lane.USER: self.user}[lane]
        registered = Registered(handler, pool, latency_key, refuse)  # type: ignore[arg-type]
        self._registered[kind_of(message_type)] = registered

    def serve(
        self, source: Source, frame: Frame, may_run: bool, interceptor: Interceptor | None = None
    ) -> Job | None:
        """Run the frame's handler in its lane; if `may_run`, one that is short is returned."""
        registered, run = self._registered.get(frame.kind), self._run
        if registered is None:
            raise BadMessage(f"no handler for messages of kind {frame.kind:#06x}")
        message = self._kinds.decode(frame.kind, frame.head)
        payload = payload_of(frame) if frame.payload else None
        if interceptor is not None:
            registered, run = interceptor.around(frame, registered, run)
        pool = registered.pool
        if pool is None:
            run(source, registered, message, payload)
            return None
        key = registered.latency_key(message)
        if pool is self.user:
            source.about = key
            self.inbound_requests.add(source)
        if may_run and self._latency.is_short(key) and pool.has_room():
            job = partial(run, source, registered, message, payload, key, 0, pool)
            return job if self._surroundings is None else partial(self._run_inside, job)
        size = EACH + len(frame.head) + sum(map(len, frame.payload))
        if not self._unserved.maybe_take(source.worker, size):
            raise OverLimit(
                f"{self._unserved.taken(source.worker)} bytes of messages wait to be served, and "
                f"{size} more have come: the limit is {self._most_unserved}",
                hint="wait for answers between sends, or raise the receiver's Limits(unserved=…)",
            )
        pool.submit(partial(run, source, registered, message, payload, key, size))
        return None

    def run_guests_inside(self, surroundings: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter this context around each handler that runs on a thread outside of the pools."""
        self._surroundings = surroundings

    def _run_inside(self, job: Job) -> None:
        assert self._surroundings is not None
        with self._surroundings():
            job()

    def inbound_on(self, channel: Channel) -> list[Source]:
        """The requests in the user lane that came by a channel, are not over, and not kept."""
        unended = {*list(self.inbound_requests), *list(self.outlasting)}
        return [each for each in unended if each.channel is channel and not each.is_kept]

    def _run(
        self,
        source: Source,
        registered: Registered,
        message: Message,
        payload: Payload,
        latency_key: Hashable = None,
        size: int = 0,
        guest_of: ElasticPool | None = None,
    ) -> None:
        """Run a handler, or `refuse` the message if nobody waits for the answer any more.

        `size` is what it counts for as unserved. If `guest_of` is set, the current (reader) thread
        counts as a thread of that pool while the handler runs. hot: every message
        """
        if guest_of is not None:
            guest_of.guests.append(None)
            mine.pool = guest_of
        began = 0.0
        try:
            if source.cancelled:
                registered.refuse(message, source)
            else:
                source.began = began = time.monotonic()
                registered.handler(message, payload, source)
                if self.is_forked and registered.pool is not None:
                    leave_fork(None)
        except BaseException as error:  # the peer must be told of any failure
            # Not in the control lane, which runs no user code: it may run on the program's main
            # thread, where a signal handler has forked, and the program goes on in the child.
            if self.is_forked and registered.pool is not None:
                leave_fork(error)
            self._on_error(source, error)
        finally:
            if began and registered.pool is not None:
                took = time.monotonic() - began
                self._latency.took(latency_key, took)
                if (record := self._events.record) is not None:
                    began = self._events.now() - took
                    about = latency_key if type(latency_key) is str else type(message)
                    record("serve", began, source.request, source.worker, about)
            self.inbound_requests.discard(source)  # it is there in the user lane only
            if size:
                self._unserved.give_back(source.worker, size)
            if guest_of is not None:
                mine.pool = None
                guest_of.guest_left()

    @property
    def active(self) -> int:
        """How many requests are being served now."""
        return self.user.active + self.service.active

    def close(self, timeout: float) -> list[str]:
        """Stop serving; the names of the threads that did not end."""
        deadline = time.monotonic() + timeout
        stuck = self.user.close(timeout, drop_queued=True)
        left = max(0.1, deadline - time.monotonic())
        return stuck + self.service.close(left, drop_queued=False)
