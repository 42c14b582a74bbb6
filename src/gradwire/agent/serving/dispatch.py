"""Which handler serves a message, and in which lane it runs.

control   at once, on the thread that reads: may not block, send or run user code
service   on a thread of its own: may block and send; never waits behind user code
user      on the elastic pool
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar, final

from gradwire.agent.serving.inbound_limit import InboundLimit
from gradwire.agent.serving.inbound_request import InboundRequests, Source
from gradwire.agent.serving.latency_estimate import LatencyEstimate
from gradwire.agent.serving.thread_pool import ElasticPool, Job
from gradwire.errors import BadMessage
from gradwire.wire.frame import Frame
from gradwire.wire.message import Kinds, Message, kind_of

M = TypeVar("M", bound=Message)


class Lane(Enum):
    """Where a handler runs."""

    CONTROL = "control"
    SERVICE = "service"
    USER = "user"


Payload = memoryview | None
Handler = Callable[[M, Payload, Source], None]
Guard = Callable[[Source, Job], None]


class _Served(NamedTuple):
    handler: Callable[[Message, Payload, Source], None]
    lane: Lane
    what: Callable[[Message], Hashable]
    refuse: Callable[[Message], None]


def _nothing(_: Message) -> None:
    pass


def payload_of(frame: Frame) -> Payload:
    """The one block of an incoming frame, if it has one."""
    if not frame.payload:
        return None
    (block,) = frame.payload
    assert isinstance(block, memoryview)
    return block


@final
class Dispatch:
    """The table of handlers of one worker."""

    def __init__(self, kinds: Kinds, name: str, threads: int, most_unserved: int) -> None:
        self._kinds = kinds
        self._inbound_limit = InboundLimit(most_unserved)
        self._served: dict[int, _Served] = {}
        self._latency = LatencyEstimate()
        self.inbound_requests = InboundRequests()
        self.user = ElasticPool(f"gradwire {name} user", threads)
        self.service = ElasticPool(f"gradwire {name} service")

    def handle(
        self,
        message_type: type[M],
        handler: Handler[M],
        lane: Lane,
        what: Callable[[M], Hashable] = type,
        refuse: Callable[[M], None] = _nothing,
    ) -> None:
        """Serve this kind of message; `what` it asks for tells how long it will take.

        One that is called off before it runs is given to `refuse`, to release what it holds.
        """
        self._kinds.add(message_type)
        served = _Served(handler, lane, what, refuse)  # type: ignore[arg-type]
        self._served[kind_of(message_type)] = served

    def serve(self, source: Source, frame: Frame, guard: Guard, may_run: bool) -> Job | None:
        """Run the frame's handler in its lane, inside `guard`, which sees to its exceptions.

        If it is short and the thread that read it may, it is given back to be run there.
        """
        served = self._served.get(frame.kind)
        if served is None:
            raise BadMessage(f"a message of kind {frame.kind:#06x} that nobody serves")
        message = self._kinds.decode(frame.kind, frame.head)
        payload = payload_of(frame) if frame.payload else None
        job = partial(served.handler, message, payload, source)
        if served.lane is Lane.CONTROL:
            guard(source, job)
            return None
        what = served.what(message)
        if served.lane is Lane.USER:
            self.inbound_requests.came(source)
            pool, refuse = self.user, served.refuse
        else:
            pool, refuse = self.service, None
        if may_run and self._latency.is_short(what) and pool.has_room():
            return partial(pool.run_here, self._run, source, what, job, guard, refuse, message)
        measured = partial(self._run, source, what, job, guard, refuse, message)
        pool.submit(self._inbound_limit.counted(source.worker, frame, measured))
        return None

    def _run(
        self,
        source: Source,
        what: Hashable,
        job: Job,
        guard: Guard,
        refuse: Callable[[Message], None] | None,
        message: Message,
    ) -> None:
        """Run the handler, or `refuse` the request if nobody waits for its answer any more."""
        try:
            if refuse is not None and source.cancelled:
                guard(source, partial(refuse, message))
                return
            began = time.monotonic()
            guard(source, job)
            self._latency.took(what, time.monotonic() - began)
        finally:
            if refuse is not None:
                self.inbound_requests.over(source)

    @property
    def active(self) -> int:
        """What is being served now."""
        return self.user.active + self.service.active

    def close(self, timeout: float) -> list[str]:
        """Stop serving; the threads that did not end."""
        deadline = time.monotonic() + timeout
        stuck = self.user.close(timeout, drop_queued=True)
        left = max(0.1, deadline - time.monotonic())
        return stuck + self.service.close(left, drop_queued=False)
