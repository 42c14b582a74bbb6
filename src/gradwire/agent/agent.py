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

from gradwire.agent.failpoints import Failpoints, failpoints_by_environment
from gradwire.agent.framing import framed
from gradwire.agent.held_locks import Sections, check_outside
from gradwire.agent.links.connections import Connections
from gradwire.agent.messages import Done, Failure
from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.refusals import RefusalLog, Refusals
from gradwire.agent.remote_errors import NameOf, TypeOf, clipped, describe, noted, revive
from gradwire.agent.requests import errors as request_errors
from gradwire.agent.requests.clock import Clock
from gradwire.agent.requests.promise import Promise
from gradwire.agent.requests.state import CallTable, Pending, Taken
from gradwire.agent.requests.timer import Timer
from gradwire.agent.serving.cancellation import Cancelling
from gradwire.agent.serving.dispatch import Dispatch, Handler, Lane, M, Payload, payload_of
from gradwire.agent.serving.inbound_request import Source
from gradwire.agent.serving.thread_pool import Job, mine
from gradwire.errors import Cancelled, DeadlinePassed, GradwireError, PeerLost, UsageError
from gradwire.events import Events
from gradwire.ids import CallId, WorkerId
from gradwire.options import Limits
from gradwire.transport.base import Channel
from gradwire.transport.forking import FORKED, let_go_in_forks
from gradwire.wire.frame import IS_ANSWER, Buffer, Frame
from gradwire.wire.message import Kinds, Message, encode

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
        refusals: Refusals,
    ) -> None:
        self.noting = RefusalLog(directory, refusals)
        self.directory, self.clock = directory, clock
        self.events, self.limits = events, limits
        self.kinds = Kinds([Failure, Done], limits.elements)
        self.dispatch = Dispatch(self.kinds, directory.me.name, threads, limits.unserved)
        self.timer = Timer(f"gradwire {directory.me.name} timer", clock)
        self._connections = connections
        self._type_of, self._name_of = type_of, name_of
        self._closing = threading.Lock()
        self._calls = CallTable()
        pools = self.dispatch.user.lock, self.dispatch.service.lock
        self.sections = Sections(directory.me.name, directory.lock, self.timer.lock, *pools)
        self._lost_listeners: list[OnLost] = []
        self._late_listeners: dict[type[Message], Callable[[WorkerId, Message], None]] = {}
        self._closed: str | None = None
        self.silence_of: Callable[[WorkerId], float] = lambda _: 0.0
        """for how long a worker has given no sign of life, if that is suspect"""
        self.failpoints: Failpoints | None = failpoints_by_environment(directory, self.kinds, clock)
        self.timer.watch(self._expire)
        self._cancelling = Cancelling(directory, self.dispatch, clock, events, self._nested)
        let_go_in_forks(self)

    def start(self) -> None:
        """Begin to accept and serve; every handler is registered by now."""
        self._connections.start(self._frame_came, self._channel_ended, self._lost)

    def handle(
        self,
        message_type: type[M],
        handler: Handler[M],
        lane: Lane,
        what: Callable[[M], Hashable] = type,
        refuse: Callable[[M], None] = lambda _: None,
    ) -> None:
        """Serve a kind of message. A handler that raises answers its request with a Failure."""
        self.dispatch.handle(message_type, handler, lane, what, refuse)

    def on_peer_lost(self, listener: OnLost) -> None:
        """Be told when the last connection to a worker ended, or a later life of it is there.

        Of the latter the directory knows by then. Must not block.
        """
        self._lost_listeners.append(listener)

    def on_peer_joined(self, listener: Callable[[WorkerId], None]) -> None:
        """Be told when a worker is connected, for the first time or again. Must not block."""
        self._connections.on_peer_joined(listener)

    def on_late(
        self, message_type: type[Message], listener: Callable[[WorkerId, Message], None]
    ) -> None:
        """Be given an answer that nobody waits for any more, to release what it holds."""
        self._late_listeners[message_type] = listener

    @property
    def in_flight(self) -> int:
        """Requests of ours that have no answer yet."""
        return len(self._calls)

    def request(
        self,
        to: WorkerId,
        message: Message,
        payload: Sequence[Buffer] = (),
        *,
        deadline: float,
        what: str,
        phase: str = "call",
        inbound: Source | None = None,
        tells: bool = False,
    ) -> tuple[CallId, Promise[Outcome]]:
        """Send, and promise the answer or the error that takes its place, by the deadline.

        Raises what keeps it from leaving; then nothing is pending. `payload` may change again when
        this returns. It ends with the `inbound` that it is made for. With `tells`, the peer hears
        if nobody waits for its answer any more.
        """
        promise: Promise[Outcome] = Promise()
        now = self.clock.now()
        known = self._connections.channels.get(to)
        channel = known[0] if known else None
        pending = Pending(to, what, now, deadline, promise, phase, inbound, tells, channel)
        check_outside(what)
        n = self._calls.opened(pending)
        if self._closed is not None:  # after it is there: of the two, close() sees the other
            self._calls.answered(n)
            raise UsageError(f"{self.directory.me.name} has shut down: {self._closed}")
        if deadline < self.timer.armed:
            self.timer.need(deadline)
        try:
            if inbound is not None and inbound.cancelled:
                raise Cancelled(f"{what} is not wanted any more: {inbound.cancelled}")
            frame = framed(message, payload, self.limits, n)
            if channel is None:
                channel = self._connections.to(to, deadline)
                self._calls.left(n, channel)
            points = self.failpoints
            send = channel.send if points is None else points.sending(to, channel)
            send(frame, deadline)
        except BaseException as error:
            self._calls.answered(n)
            self._connections.await_end(to, channel, error, deadline)
            raise self._named(error, to, what, phase) from error.__cause__
        return CallId(self.directory.me.id, n), promise

    def reach(self, to: WorkerId, deadline: float) -> None:
        """See to it that there is a connection."""
        try:
            self._connections.to(to, deadline)
        except (PeerLost, DeadlinePassed) as error:
            raise self._named(error, to, "a greeting", "connect") from error

    def hang_up(self, worker: WorkerId, reason: str) -> None:
        """End the connection to a worker, which counts as lost until it is needed again."""
        self._connections.hang_up(worker, PeerLost(reason))

    def tell(
        self,
        to: WorkerId,
        message: Message,
        payload: Sequence[Buffer] = (),
        *,
        deadline: float,
        phase: str = "call",
    ) -> None:
        """Send one way."""
        frame = framed(message, payload, self.limits)
        channel = None
        try:
            channel = self._connections.to(to, deadline)
            points = self.failpoints
            send = channel.send if points is None else points.sending(to, channel)
            send(frame, deadline)
        except (PeerLost, DeadlinePassed) as error:
            self._connections.await_end(to, channel, error, deadline)
            raise self._named(error, to, type(message).__name__, phase) from error

    def _named(self, error: BaseException, to: WorkerId, what: str, phase: str) -> BaseException:
        if isinstance(error, PeerLost) and not self.directory.has(to):
            self._lost(to, error, error.link)
        return request_errors.unsent(self.directory.name(to), what, phase, error)

    def cancel(self, promise: Promise[Outcome], why: str) -> bool:
        """Nobody wants this answer any more; False if it has come already."""
        taken = self._calls.withdrawn(promise)
        self._cancelling.call_off(taken, why)
        return bool(taken)

    def _nested(self, inbound: Source) -> list[Taken]:
        return self._calls.made_for(inbound)

    def answer(
        self, source: Source, message: Message, payload: Sequence[Buffer] = (), *, deadline: float
    ) -> bool:
        """Answer a request, on the channel it came by; False if the asker is lost."""
        if source.request == 0 or source.cancelled:
            return False
        frame = framed(message, payload, self.limits, source.request, IS_ANSWER)
        try:
            points = self.failpoints
            send = source.channel.send if points is None else points.replying(source)
            send(frame, deadline)
        except PeerLost:
            self.events.emit("unanswered", source.request, self.directory.name(source.worker))
            return False
        return True

    def is_connected(self, worker: WorkerId) -> bool:
        """Whether there is a connection to it now."""
        return self._connections.has(worker)

    def unreached(self, worker: WorkerId, tell: Callable[[], None]) -> bool:
        """It could not be reached: unless it is connected now, `tell` counts it as lost."""
        return self._connections.unreached(worker, tell)

    def check_asker(self, source: Source) -> None:
        """Raise if who asked is lost. Then nobody waits for what was asked, or would let go of it.

        Under the lock that `on_peer_lost` takes this is exact: what passes is found by the loss.
        """
        if not self._connections.has(source.worker, source.channel):
            raise PeerLost(f"{self.directory.name(source.worker)} was lost after it had asked")

    def answer_with(self, source: Source, error: BaseException) -> None:
        """Answer a request with an exception."""
        failure = noted(describe(error, self.directory.me.name, self._name_of), source.note)
        if len(encode(failure)) > self.limits.head:
            failure = clipped(failure, self.limits.head // 8)
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
        if not self._closing.acquire(blocking=False):
            return []
        self._closed = reason
        open_calls = self._calls.closed()
        error = PeerLost(f"{self.directory.me.name} shut down before an answer came: {reason}")
        error.about("", phase="shutdown")
        for taken in open_calls:
            taken.pending.slot.settle(error)
        self._connections.close(reason)
        stuck = self.dispatch.close(timeout)
        self.timer.close()
        return stuck

    def forked(self) -> None:
        """In a process forked from this one: this agent has left, without a word to anybody."""
        self._closed = FORKED
        self.sections.forked()

    def _frame_came(
        self, worker: WorkerId, channel: Channel, frame: Frame, may_run: bool
    ) -> Job | None:
        points = self.failpoints
        if frame.flags & IS_ANSWER:
            if points is None:
                self._answer_came(worker, frame)
            else:
                points.around_answer(channel, self._answer_came)(worker, frame)
            return None
        source = Source(worker, channel, frame.request)
        guard = self.guarded if points is None else points.around(self.guarded, frame.kind)
        return self.dispatch.serve(source, frame, guard, may_run)

    def wait(
        self, peer: WorkerId | None, done: Callable[[], bool], block: Callable[[], object]
    ) -> None:
        """Until `done` by what this peer sends, or by the end of it; `block` waits for that.

        Not counted as running, if it is a function of a peer's that waits.
        """
        if done():
            return
        known = None if peer is None else self._connections.channels.get(peer)
        channel, readers = known[0] if known else None, self._connections.readers
        pool = mine.pool
        if pool is None or pool.limit is None:
            readers.wait(channel, done, block)
            return
        with pool.waiting():  # of another worker, if a finalizer of ours has interrupted it
            readers.wait(channel, done, block)

    def _answer_came(self, worker: WorkerId, frame: Frame) -> None:
        message = self.kinds.decode(frame.kind, frame.head)
        pending = self._calls.answered(frame.request, worker)
        if pending is not None:
            answer = Answer(message, payload_of(frame) if frame.payload else None)
            pending.slot.settle(self._revived(message) if isinstance(message, Failure) else answer)
            return
        self.noting.came_late(worker)
        listener = self._late_listeners.get(type(message))
        if listener is not None:
            self.dispatch.user.submit(lambda: listener(worker, message))

    def _revived(self, failure: Failure) -> Exception:
        try:
            return self.revive(failure)
        except Exception as error:  # whoever waits must hear something
            return error

    def guarded(self, source: Source, job: Job) -> None:
        """Run what answers a request; if it raises, that is the answer."""
        try:
            job()
        except BaseException as error:  # whatever it is, the asker must be told
            if not isinstance(error, Exception) and mine.pool is None:
                raise  # Ctrl-C on a thread of the user's that reads while it waits
            is_refusal = self.noting.note(source.worker, error)
            if source.request == 0:
                if is_refusal:
                    return
                name = self.directory.name(source.worker)
                _log.exception("%s: a message from %s failed here", self.directory.me.name, name)
            else:
                self.answer_with(source, error)

    def _expire(self, now: float) -> float | None:
        late = self._calls.passed(now)
        following = self._calls.next_deadline()
        for n, pending, _ in late:
            name, call = self.directory.name(pending.peer), CallId(self.directory.me.id, n)
            silence = self.silence_of(pending.peer)
            pending.slot.settle(request_errors.late(name, call, pending, silence))
        self._cancelling.tell(late)
        return following

    def _channel_ended(
        self, worker: WorkerId, channel: Channel, reason: GradwireError, last: bool
    ) -> None:
        lost = self._calls.channel_lost(channel)
        name, link, now = self.directory.name(worker), channel.remote, self.clock.now()
        self.noting.note(worker, reason)
        for n, pending, _ in lost:
            call = CallId(self.directory.me.id, n)
            pending.slot.settle(request_errors.lost(name, call, pending, reason, link, now))
        orphans = self.dispatch.inbound_requests.of_channel(channel)
        self._cancelling.stop(orphans, f"{name}, which asked, was lost")
        if last:
            self._lost(worker, reason, link)

    def _lost(self, worker: WorkerId, reason: GradwireError, link: str = "") -> None:
        for listener in self._lost_listeners:
            listener(worker, request_errors.gone(self.directory.name(worker), reason, link))


_FAILURE_SECONDS = 10.0
"""How long an error may take to leave. The one who waits for it has a deadline of its own."""
