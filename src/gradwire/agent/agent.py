"""Requests and answers between named workers.

The agent owns the table of requests, sends frames, and passes inbound frames to promises and
handlers. Upper layers register handlers (`handle`) and listeners for lost peers (`on_peer_lost`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, final

import msgspec

from gradwire.agent.links.connections import Connections
from gradwire.agent.links.readers import Block, IsDone
from gradwire.agent.membership.heartbeat import Heartbeat
from gradwire.agent.messages import Done, Failure
from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.refusals import RefusalLog, Refusals
from gradwire.agent.remote_errors import NameOf, TypeOf, clipped, describe, noted, revive
from gradwire.agent.requests.cancels import SECONDS, Cancels
from gradwire.agent.requests.ends import Ends, Tally
from gradwire.agent.requests.promise import Pending, Promise, RequestTable, unsent
from gradwire.agent.requests.timer import Clock, Timer
from gradwire.agent.serving.dispatch import Dispatch, Interceptor, Payload, Source, payload_of
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.agent.serving.thread_pool import Job, mine
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost, UsageError
from gradwire.events import JOINED, Events
from gradwire.ids import CallId, WorkerId
from gradwire.options import Options
from gradwire.threads import FORKED, WorkerLocks, call_after_fork, check_gil, check_may_wait
from gradwire.transport.base import Channel
from gradwire.wire.message import IS_ANSWER, Buffer, Frame, Kinds, Message, kind_of, make_frame

_log = logging.getLogger("gradwire")


class Answer(msgspec.Struct):
    """The message that answers a request."""

    message: Message
    payload: Payload
    is_taken: bool = False
    """whether a thread has begun to decode it, and releases what it does not use"""


Outcome = Answer | Exception
OnLost = Callable[[WorkerId, PeerLost], None]
OnAnswer = Callable[[WorkerId, Message], None]
Concerns = Callable[[Message], object]
T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@final
class Agent:
    """Sends the requests of one worker, and serves those of its peers."""

    _closed: str | None = None
    """why it is closed"""

    def __init__(
        self,
        directory: Directory,
        connections: Connections,
        clock: Clock,
        events: Events,
        options: Options,
        *,
        type_of: TypeOf,
        name_of: NameOf,
        refusals: Refusals,
        interceptor: Interceptor | None = None,
    ) -> None:
        check_gil()
        self.noting, self._refusals = RefusalLog(directory, refusals), refusals
        self.directory, self.clock, self.events = directory, clock, events
        self.limits, me = options.limits, directory.me.name
        self.kinds = Kinds([Failure, Done], self.limits.elements)
        self.dispatch = Dispatch(self.kinds, me, options, self.failed, events)
        self.timer = Timer(f"gradwire {me} timer", clock)
        self._connections = self.connections = connections
        self._channels_to, self.read_some = connections.channels.get, connections.read_some
        self.describe = partial(describe, worker=me, name_of=name_of)
        self.revive = partial(revive, type_of=type_of)
        self._closing, self._calls, self.ends = threading.Lock(), RequestTable(), Ends()
        self.handle, self.since = self.dispatch.handle, self._calls.since
        self.window = PeerLimit("in_flight", self.limits.in_flight, one_may_exceed=True)
        """the bytes of calls without an answer: what leaves the table of requests is uncounted"""
        locks = (self.timer.lock, self.dispatch.user.lock, self.dispatch.service.lock)
        self.locks = WorkerLocks(me, directory.lock, self.window.lock, *locks)
        self._lost_listeners: list[OnLost] = []
        self._joined_listeners: list[Callable[[WorkerId], None]] = []
        self._answer_listeners: dict[int, tuple[Concerns, OnAnswer, OnAnswer]] = {}  # by kind
        self.interceptor = interceptor
        self.timer.watch(self._expire)
        beside = (directory, connections, self.dispatch, self.timer, events, options.timeouts)
        self._heartbeat = Heartbeat(*beside)
        self.silence_of, self.silences = self._heartbeat.silence_of, self._heartbeat.silences
        self._cancels = Cancels(directory, self._calls, self._settle, self.dispatch, clock, events)
        self.cancel, self.stop_serving = self._cancels.cancel, self._cancels.stop
        call_after_fork(self)

    def start(self, contexts_opened: Callable[[], int]) -> None:
        """Begin to accept and serve; every handler is registered. `contexts_opened`: for Hello."""
        self._connections.start(
            on_frame=self._frame_came,
            on_joined=self._joined,
            on_opened=self._heartbeat.channel_opened,
            on_end=self._ended,
            on_reborn=self._lost,
            contexts_opened=contexts_opened,
        )

    def on_peer_lost(self, listener: OnLost) -> None:
        """Add a listener for the loss of a worker; it must not block.

        A new incarnation means that the earlier one is lost; the directory knows the new one then.
        """
        self._lost_listeners.append(listener)

    def on_peer_joined(self, listener: Callable[[WorkerId], None]) -> None:
        """Add a listener for a worker that is connected, or connected again. It must not block."""
        self._joined_listeners.append(listener)

    def on_answer(
        self, message_type: type[Message], concerns: Concerns, came: OnAnswer, late: OnAnswer
    ) -> None:
        """Set the listeners for an answer: `came` for each one with a true `concerns(message)`.

        These two are called by the thread that reads, before the waiting thread has the answer, so
        they must not block. `late` releases what an answer holds that came too late.
        """
        self._answer_listeners[kind_of(message_type)] = concerns, came, late

    @property
    def in_flight(self) -> int:
        """How many requests of this worker have no answer yet."""
        return len(self._calls)

    def unanswered(self) -> list[Pending]:
        """The requests of this worker that have no answer yet, the oldest first."""
        return self._calls.all()

    def request(
        self,
        to: WorkerId,
        message: Message,
        payload: Sequence[Buffer] = (),
        *,
        deadline: float,
        description: str,
        phase: str = "call",
        inbound: Source | None = None,
        notify_cancel: bool = False,
    ) -> tuple[CallId, Promise[Outcome]]:
        """Send a request; the promise is settled by the deadline, with the answer or an error.

        Raises if it cannot be sent; then nothing is pending. `payload` may be changed once this
        returns. The request is cancelled with the `inbound` request that it is made for. With
        `notify_cancel`, the peer is notified if nobody waits for the answer any more.
        """
        promise: Promise[Outcome] = Promise()
        now, about = self.clock.now(), (deadline, promise, phase, inbound, notify_cancel)
        pending = Pending(to, description, now, *about)
        try:
            self.issue(pending, message, payload)
            return CallId(self.directory.me.id, pending.n), promise
        except BaseException:
            if pending.has_left:
                self.cancel(promise, "the thread that made it was interrupted")
            raise

    def issue(self, pending: Pending, message: Message, payload: Sequence[Buffer] = ()) -> None:
        """As `request`, of which `pending` has the arguments. hot: each call

        If this raises and it `has_left`, a signal handler has raised: the caller cancels it.
        """
        to, deadline, frame = pending.peer, pending.deadline, None
        via = pending.via = known[0] if (known := self._channels_to(to)) else None
        check_may_wait(pending.description)
        try:
            n = pending.promise.request = self._calls.opened(pending)
            # Checked after it was added: close() sets `_closed` first and then empties the table,
            # so either it finds this request, or this finds `_closed`.
            if self._closed is not None:
                raise UsageError(f"{self.directory.me.name} has shut down: {self._closed}")
            if deadline < self.timer.armed:
                self.timer.need(deadline)
            if pending.inbound is not None and (why := pending.inbound.cancelled):
                raise pending.cancelled(self.directory.name(to), self.directory.me.id, why)
            frame = make_frame(message, payload, self.limits, n)
            if via is None:
                via = pending.via = self._connections.to(to, deadline)
            if (catch := self.interceptor) is None:
                via.send(frame, deadline)
            else:
                catch.send(to, via, frame, deadline)
            pending.has_left = True
            if (record := self.events.record) is not None:
                about = pending.description, message.carried
                record("call", pending.opened, n, to, about, frame.size)
        except BaseException as error:
            if frame is not None and frame.has_left and not isinstance(error, GradwireError):
                pending.has_left = True
                raise
            self._calls.answered(pending.n)
            self.window.uncount(pending, self.ends.unsent)
            self._connections.await_end(to, via, error, deadline)
            raise self._named(error, to, pending.description, pending.phase) from error.__cause__

    def reach(self, to: WorkerId, deadline: float) -> None:
        """Connect to a worker, unless it is connected."""
        try:
            self._connections.to(to, deadline)
        except (PeerLost, DeadlinePassed) as error:
            raise self._named(error, to, "the handshake", "connect") from error

    def hang_up(self, worker: WorkerId, reason: str) -> None:
        """Close the connection to a worker, which counts as lost until it is needed again."""
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
        """Send a message that has no answer."""
        frame = make_frame(message, payload, self.limits)
        channel = None
        try:
            channel = self._connections.to(to, deadline)
            if (catch := self.interceptor) is None:
                channel.send(frame, deadline)
            else:
                catch.send(to, channel, frame, deadline)
        except (PeerLost, DeadlinePassed) as error:
            self._connections.await_end(to, channel, error, deadline)
            raise self._named(error, to, type(message).__name__, phase) from error

    def _named(self, error: BaseException, to: WorkerId, what: str, phase: str) -> BaseException:
        if isinstance(error, PeerLost) and not self.directory.has(to):
            self._lost(to, error, error.link)
        named = unsent(self.directory.name(to), what, phase, error)
        return self.with_story(named) if isinstance(named, GradwireError) else named

    def _settle(self, pending: Pending, outcome: Outcome, ended: Tally | None = None) -> None:
        """End a request that was taken out of the table, as one more of those that `ended` so.

        None: it is cancelled. Doing it twice does no harm.
        """
        self.window.uncount(pending, self.ends.cancelled if ended is None else ended)
        pending.promise.settle(outcome)

    def answer(
        self, source: Source, message: Message, payload: Sequence[Buffer] = (), *, deadline: float
    ) -> bool:
        """Answer a request on the channel it came by; False if cancelled or the peer is lost."""
        if not source.request or source.cancelled:
            return False
        frame, began = make_frame(message, payload, self.limits, source.request, IS_ANSWER), 0.0
        if (record := self.events.record) is not None:
            began, source.answered = self.clock.now(), True
        try:
            if (catch := self.interceptor) is None:
                source.channel.send(frame, deadline)
            else:
                catch.send(source.worker, source.channel, frame, deadline)
        except PeerLost:
            call = CallId(source.worker, source.request)
            self.events.note("unanswered", call, source.worker)
            return False
        if record is not None:
            about = "", message.carried
            record("answer", began, source.request, source.worker, about, frame.size)
        return True

    def is_connected(self, worker: WorkerId) -> bool:
        """Whether there is a connection to a worker now."""
        return bool(self._channels_to(worker))

    def link_to(self, worker: WorkerId) -> str:
        """The address that a worker is reached at now, or empty."""
        channels = self._channels_to(worker)
        return channels[0].remote if channels else ""

    def check_asker(self, source: Source) -> None:
        """PeerLost if the peer that sent a request is gone: nobody would release its result.

        To add state about a peer, do so and check under the lock that your `on_peer_lost` listener
        takes, or check afterwards. Otherwise the listener may run in between and miss it.
        """
        if source.channel not in self._channels_to(source.worker, ()):
            raise PeerLost(f"the caller {self.directory.name(source.worker)} was lost")

    def close(self, reason: str, timeout: float) -> list[str]:
        """Stop, and fail what still waits. Returns the names of the threads that did not end."""
        if not self._closing.acquire(blocking=False):
            return []
        self._closed = reason
        error = PeerLost(f"{self.directory.me.name} shut down before an answer came: {reason}")
        error.about("", phase="shutdown")
        for pending in self._calls.closed():
            self._settle(pending, error, self.ends.lost)
        self._connections.close(reason)
        stuck = self.dispatch.close(timeout)
        self.timer.close()
        return stuck

    def forked(self) -> None:
        """In a forked process: this agent is closed, and sends nothing."""
        self._closed, self.dispatch.is_forked = FORKED, True
        self.locks.forked()

    def _frame_came(
        self, worker: WorkerId, channel: Channel, frame: Frame, may_run: bool
    ) -> Job | None:
        # See Note [What was before a loss] in links/connections.py.
        if channel not in self._channels_to(worker, ()):
            self._refusals.count("earlier incarnation", self.directory.name(worker))
            raise PeerLost("a message of an earlier connection is not read")
        if not frame.flags & IS_ANSWER:
            source = Source(worker, channel, frame.request)
            return self.dispatch.serve(source, frame, may_run, self.interceptor)
        if (catch := self.interceptor) is None:
            self._answer_came(worker, frame)
        else:
            catch.take_answer(self._answer_came, worker, channel, frame)
        return None

    def wait(self, peer: WorkerId | None, done: IsDone, block: Block) -> None:
        """Wait until `done`: read this peer's channel for a while if no thread does, then `block`.

        A waiting pool thread does not count against the pool's size limit.
        """
        if not done():
            self._wait(peer, done, block)

    def _wait(self, peer: WorkerId | None, done: IsDone, block: Block) -> None:
        """As `wait`, where it was not `done` a moment ago. hot: every call"""
        known = self._channels_to(peer)  # type: ignore[arg-type]  # None has no channel
        channel = known[0] if known else None
        pool = mine.pool  # of another worker, if one of our finalizers runs on its thread
        if pool is None or pool.limit is None:
            self._connections.readers.wait(channel, done, block)
        else:
            with pool.waiting():
                self._connections.readers.wait(channel, done, block)

    def wait_for(self, peer: WorkerId | None, promise: Promise[T]) -> T:
        """The outcome of a promise that a message of this peer settles. hot: every call"""
        if not promise.settled:
            is_settled = partial(getattr, promise, "settled")  # polled: avoids a Python frame
            if (record := self.events.record) is None:
                self._wait(peer, is_settled, promise.wait)
            else:
                began = self.clock.now()
                self._wait(peer, is_settled, promise.wait)
                record("waited", began, getattr(promise, "request", 0), peer)
        return promise.outcome  # type: ignore[return-value]  # settled, so it is a T

    def _answer_came(self, worker: WorkerId, frame: Frame) -> None:
        message = self.kinds.decode(frame.kind, frame.head)
        heard = self._answer_listeners.get(frame.kind)
        if heard is not None and heard[0](message):
            heard[1](worker, message)
        outcome: Outcome = Answer(message, payload_of(frame) if frame.payload else None)
        ended = self.ends.answered
        if isinstance(message, Failure):
            ended = self.ends.raised
            try:
                outcome = self.revive(message)
            except Exception as error:  # the waiting thread must get some outcome
                outcome = error
        pending = self._calls.maybe(frame.request)
        try:
            if (taken := self._calls.answered(frame.request, worker)) is not None:
                if taken.size:
                    self.window.uncount(taken, ended)
                taken.promise.settle(outcome)
                return
        except BaseException:
            # A signal handler has raised here, perhaps in a thread that does not wait for this
            # answer. If the request is in no table, nobody else settles it.
            if pending is not None and pending.n not in self._calls:
                self._settle(pending, outcome, ended)
            raise
        self.noting.came_late(worker)
        if heard is not None and self._calls.is_late(frame.request):
            self.dispatch.user.submit(partial(heard[2], worker, message))

    def guarded(self, source: Source, job: Job) -> None:
        """Run the rest of a handler's work; if it raises, the exception is the answer."""
        try:
            job()
        except BaseException as error:  # the peer must be told of any failure
            self.failed(source, error)

    def failed(self, source: Source, error: BaseException) -> None:
        """The handler of a message has raised this: answer the request with it."""
        if not isinstance(error, Exception) and mine.pool is None:
            raise error  # Ctrl-C on a user's thread that reads while it waits
        is_refusal = self.noting.note(source.worker, error)
        me, name = self.directory.me.name, self.directory.name(source.worker)
        if source.request == 0:
            if not is_refusal:
                _log.error("%s: a message from %s failed here", me, name, exc_info=error)
            return
        failure = clipped(noted(self.describe(error), source.note), self.limits.head)
        try:
            self.answer(source, failure, deadline=self.clock.now() + SECONDS)
        except GradwireError:
            _log.exception("%s could not tell %s of an error", me, name)

    def _expire(self, now: float) -> float | None:
        late, following = self._calls.expire(now)
        for pending in late:
            name, silence = self.directory.name(pending.peer), self.silence_of(pending.peer)
            late_by = self.with_story(pending.late(name, self.directory.me.id, silence))
            self._settle(pending, late_by, self.ends.late)
        self._cancels.send(late)
        return following

    def _ended(self, worker: WorkerId, channel: Channel, reason: GradwireError, last: bool) -> None:
        lost = self._calls.channel_lost(channel)
        name, link, now = self.directory.name(worker), channel.remote, self.clock.now()
        self.noting.note(worker, reason)
        for pending in lost:
            error = pending.lost(name, self.directory.me.id, reason, link, now)
            self._settle(pending, self.with_story(error), self.ends.lost)
        self._cancels.stop(self.dispatch.inbound_on(channel), f"the caller {name} was lost")
        if last:
            self._lost(worker, reason, link)

    def with_story(self, error: E) -> E:
        """The error, with a note of what happened here in the last seconds."""
        if story := self.events.story(self.directory.name):
            error.add_note(f"before this, on {self.directory.me.name}:\n{story}")
        return error

    def _joined(self, worker: WorkerId) -> None:
        self.events.note(JOINED, "", worker)
        for listener in self._joined_listeners:
            listener(worker)

    def _lost(self, worker: WorkerId, reason: GradwireError, link: str = "") -> None:
        name, where = self.directory.name(worker), f" [{link}]" if link else ""
        self.events.note("was lost", "", worker, str(reason))
        for listener in self._lost_listeners:
            lost = PeerLost(f"{name} was lost: {reason}{where}")
            listener(worker, lost.about(name, link=link))
