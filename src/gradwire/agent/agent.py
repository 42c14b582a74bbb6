"""Requests and answers between named workers.

The driver of this layer: it owns the table of requests and performs what the states decide.
Upper layers register what they serve (`handle`) and are told of lost peers (`on_peer_lost`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import final

import msgspec

from gradwire.agent.calls_state import CallTable, Pending
from gradwire.agent.clock import Clock
from gradwire.agent.connections import Connections
from gradwire.agent.directory import Directory
from gradwire.agent.dispatch import Dispatch, Handler, Lane, M, Payload, Source, payload_of
from gradwire.agent.failure import NameOf, TypeOf, clipped, describe, revive
from gradwire.agent.messages import Done, Failure
from gradwire.agent.pool import Job
from gradwire.agent.promise import Promise
from gradwire.agent.timer import Timer
from gradwire.errors import (
    CallTimeout,
    CannotTravel,
    DeadlinePassed,
    GradwireError,
    PeerLost,
    UsageError,
)
from gradwire.events import Events
from gradwire.ids import CallId, WorkerId
from gradwire.options import Limits
from gradwire.transport.base import Channel
from gradwire.wire.frame import IS_ANSWER, Buffer, Frame
from gradwire.wire.message import Kinds, Message, encode, kind_of

_log = logging.getLogger("gradwire")


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    message: Message
    payload: Payload


Outcome = Answer | Exception
OnLost = Callable[[WorkerId, PeerLost], None]


@final
class Agent:
    """One worker's side of every request."""

    def __init__(
        self,
        directory: Directory,
        connections: Connections,
        clock: Clock,
        events: Events,
        *,
        threads: int,
        limits: Limits,
        type_of: TypeOf,
        name_of: NameOf,
    ) -> None:
        self.directory = directory
        self.clock = clock
        self.events = events
        self.kinds = Kinds([Failure, Done])
        self.dispatch = Dispatch(self.kinds, directory.me.name, threads)
        self.timer = Timer(f"gradwire {directory.me.name} timer", clock)
        self._connections = connections
        self._limits = limits
        self._type_of, self._name_of = type_of, name_of
        self._lock = threading.Lock()
        self._calls = CallTable()
        self._lost_listeners: list[OnLost] = []
        self._late_listeners: dict[type[Message], Callable[[Message], None]] = {}
        self._closed: str | None = None
        self.timer.watch(self._expire)

    def start(self) -> None:
        """Begin to accept and serve; every handler is registered by now."""
        self._connections.start(self._frame_came, self._channel_ended)

    def handle(
        self,
        message_type: type[M],
        handler: Handler[M],
        lane: Lane,
        what: Callable[[M], Hashable] = type,
    ) -> None:
        """Serve a kind of message. A handler that raises answers its request with a Failure."""
        self.dispatch.handle(message_type, handler, lane, what)

    def on_peer_lost(self, listener: OnLost) -> None:
        """Be told when the last connection to a worker ended. Must not block."""
        self._lost_listeners.append(listener)

    def on_peer_joined(self, listener: Callable[[WorkerId], None]) -> None:
        """Be told when a worker is connected, for the first time or again. Must not block."""
        self._connections.on_joined = listener

    def on_late(self, message_type: type[Message], listener: Callable[[Message], None]) -> None:
        """Be given an answer that nobody waits for any more, to release what it holds."""
        self._late_listeners[message_type] = listener

    @property
    def in_flight(self) -> int:
        """Requests of ours that have no answer yet."""
        with self._lock:
            return len(self._calls)

    def request(
        self,
        to: WorkerId,
        message: Message,
        payload: Sequence[Buffer] = (),
        *,
        deadline: float,
        what: str,
    ) -> tuple[CallId, Promise[Outcome]]:
        """Send, and promise the answer or the error that takes its place, by the deadline.

        Raises what keeps it from leaving; then nothing is pending. `payload` may change again when
        this returns.
        """
        promise: Promise[Outcome] = Promise()
        pending = Pending(to, what, self.clock.now(), deadline, promise)
        with self._lock:
            if self._closed is not None:
                raise UsageError(f"{self.directory.me.name} has shut down: {self._closed}")
            n = self._calls.opened(pending)
        self.timer.need(deadline)
        try:
            frame = self._frame(message, payload, request=n)
            channel = self._connections.to(to, deadline)
            with self._lock:
                self._calls.left(n, channel)
            channel.send(frame, deadline)
        except BaseException as error:
            with self._lock:
                self._calls.answered(n)
            raise self._named(error, to, what) from error.__cause__
        return CallId(self.directory.me.id, n), promise

    def reach(self, to: WorkerId, deadline: float) -> None:
        """See to it that there is a connection."""
        try:
            self._connections.to(to, deadline)
        except (PeerLost, DeadlinePassed) as error:
            raise self._named(error, to, "a greeting") from error

    def tell(
        self, to: WorkerId, message: Message, payload: Sequence[Buffer] = (), *, deadline: float
    ) -> None:
        """Send one way."""
        frame = self._frame(message, payload)
        try:
            self._connections.to(to, deadline).send(frame, deadline)
        except (PeerLost, DeadlinePassed) as error:
            raise self._named(error, to, type(message).__name__) from error

    def _named(self, error: BaseException, to: WorkerId, what: str) -> BaseException:
        """What keeps a message from leaving says for whom it was."""
        name = self.directory.name(to)
        if isinstance(error, PeerLost):
            if not self.directory.has(to):
                self._lost(to, error)
            return PeerLost(f"{name} was lost before {what} reached it: {error.message}")
        if isinstance(error, DeadlinePassed):
            return CallTimeout(f"{what} did not leave for {name} in time: {error.message}")
        return error

    def answer(
        self, source: Source, message: Message, payload: Sequence[Buffer] = (), *, deadline: float
    ) -> bool:
        """Answer a request, on the channel it came by; False if the asker is lost."""
        if source.request == 0:
            return False
        frame = self._frame(message, payload, request=source.request, flags=IS_ANSWER)
        try:
            source.channel.send(frame, deadline)
        except PeerLost:
            self.events.emit("unanswered", source.request, self.directory.name(source.worker))
            return False
        return True

    def is_connected(self, worker: WorkerId) -> bool:
        """Whether there is a connection to it now."""
        return self._connections.has(worker)

    def check_asker(self, source: Source) -> None:
        """Raise if who asked is lost. Then nobody waits for what was asked, or would let go of it.

        Under the lock that `on_peer_lost` takes this is exact: what passes is found by the loss.
        """
        if not self._connections.has(source.worker, source.channel):
            raise PeerLost(f"{self.directory.name(source.worker)} was lost after it had asked")

    def _frame(
        self, message: Message, payload: Sequence[Buffer], *, request: int = 0, flags: int = 0
    ) -> Frame:
        """What is over the limits is refused here: its receiver would give up the connection."""
        head, body = encode(message), sum(map(len, payload)) if payload else 0
        if len(head) > self._limits.head or body > self._limits.payload:
            raise CannotTravel(
                f"a {type(message).__name__} of {len(head)} bytes and {body} bytes of tensors is "
                f"over the limits of {self._limits.head} and {self._limits.payload}",
                hint="send it in parts, or raise Options(limits=Limits(…)) on both workers",
            )
        return Frame(kind_of(type(message)), flags, request, head, payload)

    def answer_with(self, source: Source, error: BaseException) -> None:
        """Answer a request with an exception."""
        failure = describe(error, self.directory.me.name, self._name_of)
        if len(encode(failure)) > self._limits.head:
            failure = clipped(failure, self._limits.head // 8)
        try:
            self.answer(source, failure, deadline=self.clock.now() + _FAILURE_SECONDS)
        except GradwireError:
            name = self.directory.name(source.worker)
            _log.exception("%s could not tell %s of an error", self.directory.me.name, name)

    def describe(self, error: BaseException) -> Failure:
        """An exception of ours as data."""
        return describe(error, self.directory.me.name, self._name_of)

    def revive(self, failure: Failure) -> GradwireError:
        """A peer's exception, to raise here."""
        return revive(failure, self._type_of)

    def close(self, reason: str, timeout: float) -> list[str]:
        """Stop everything; what still waits gets an error. Returns the threads that did not end."""
        with self._lock:
            if self._closed is not None:
                return []
            self._closed = reason
            open_calls = self._calls.closed()
        error = PeerLost(f"{self.directory.me.name} shut down before an answer came: {reason}")
        for _, pending in open_calls:
            _settle(pending, error)
        self._connections.close(reason)
        stuck = self.dispatch.close(timeout)
        self.timer.close()
        return stuck

    def _frame_came(
        self, worker: WorkerId, channel: Channel, frame: Frame, may_run: bool
    ) -> Job | None:
        if frame.flags & IS_ANSWER:
            self._answer_came(frame)
            return None
        source = Source(worker, channel, frame.request)
        return self.dispatch.serve(source, frame, self.guarded, may_run)

    def wait(self, peer: WorkerId, done: Callable[[], bool], block: Callable[[], object]) -> None:
        """Until `done` by what this peer sends, or by the end of it; `block` waits for that.

        Not counted as running, if it is a function of a peer's that waits.
        """
        if done():
            return
        with self.dispatch.user.waiting():
            self._connections.wait(peer, done, block)

    def _answer_came(self, frame: Frame) -> None:
        message = self.kinds.decode(frame.kind, frame.head)
        with self._lock:
            pending = self._calls.answered(frame.request)
        if pending is not None:
            try:
                outcome = self._outcome(message, frame)
            except Exception as error:  # whoever waits must hear something
                outcome = error
            _settle(pending, outcome)
        elif (listener := self._late_listeners.get(type(message))) is not None:
            self.dispatch.user.submit(lambda: listener(message))

    def _outcome(self, message: Message, frame: Frame) -> Outcome:
        if isinstance(message, Failure):
            return self.revive(message)
        return Answer(message, payload_of(frame))

    def guarded(self, source: Source, job: Job) -> None:
        """Run what answers a request; if it raises, that is the answer."""
        try:
            job()
        except BaseException as error:  # whatever it is, the asker must be told
            if source.request == 0:
                name = self.directory.name(source.worker)
                _log.exception("%s: a message from %s failed here", self.directory.me.name, name)
            else:
                self.answer_with(source, error)

    def _expire(self, now: float) -> float | None:
        with self._lock:
            late = self._calls.passed(now)
            following = self._calls.next_deadline()
        for n, pending in late:
            waited = pending.deadline - pending.opened
            name = self.directory.name(pending.peer)
            error = CallTimeout(
                f"{name} did not answer {CallId(self.directory.me.id, n)} ({pending.what}) "
                f"within {float(f'{waited:.2g}'):g} s",
                hint="a longer timeout= on the call, or Timeouts(call=…) in the options, wait more",
            )
            _settle(pending, error)
        return following

    def _channel_ended(
        self, worker: WorkerId, channel: Channel, reason: GradwireError, last: bool
    ) -> None:
        with self._lock:
            lost = self._calls.channel_lost(channel)
        name = self.directory.name(worker)
        for n, pending in lost:
            call = CallId(self.directory.me.id, n)
            error = PeerLost(f"{name} was lost before answering {call} ({pending.what}): {reason}")
            _settle(pending, error)
        if last:
            self._lost(worker, reason)

    def _lost(self, worker: WorkerId, reason: GradwireError) -> None:
        name = self.directory.name(worker)
        for listener in self._lost_listeners:
            listener(worker, PeerLost(f"{name} was lost: {reason}"))


_FAILURE_SECONDS = 10.0
"""How long an error may take to leave. The one who waits for it has a deadline of its own."""


def _settle(pending: Pending, outcome: Outcome) -> None:
    assert isinstance(pending.slot, Promise)
    pending.slot.settle(outcome)
