"""Channels to peers: made when first needed, until they end. Who reads them is in readers.py.

Between two workers there may be two channels, when both dialled at once; either carries anything.
What a frame means is not known here: it is handed to `on_frame` together with whence it came.

Note [What was before a loss]: with one channel to a worker all of them end, and the layers above
forget what they had with it. Nothing of before may meet anything of after. So a loss is told before
the next channel is used, and whoever greets says how often it has lost the other: then the other,
which may not have noticed, has lost it too. A channel that was greeted before a loss, at
either end, is not used after it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, NoReturn, final

from gradwire.agent.links import handshake, introduction
from gradwire.agent.links.acceptor import Acceptor
from gradwire.agent.links.channel_ends import Ends
from gradwire.agent.links.readers import ChannelReader, ChannelReaders, OnFrame
from gradwire.agent.messages import Hello
from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret
from gradwire.agent.peers.state import Member
from gradwire.agent.requests.timer import Clock
from gradwire.agent.serving.thread_pool import Job
from gradwire.errors import (
    DeadlinePassed,
    GradwireError,
    NotTrusted,
    OverLimit,
    PeerLost,
    UsageError,
)
from gradwire.ids import WorkerId
from gradwire.options import Options
from gradwire.threads import FORKED, Threads, call_after_fork
from gradwire.transport.address import Transports
from gradwire.transport.base import Channel, Listener
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.frame import Frame
from gradwire.wire.message import Kinds, encode, kind_of

OnEnd = Callable[[WorkerId, Channel, GradwireError, bool], None]
"""Told that a channel to a worker ended, why, and whether it was the last one to that worker."""

_JOIN_SECONDS = 5.0
IN_A_FORK = "start processes by spawn, or wait in the worker and hand over the value"
_HELLO = Kinds([Hello])


class _Overtaken(PeerLost):
    """A worker was lost while a channel to it was made: another may be made at once."""


class _Greeted(NamedTuple):
    """How often each of two workers had lost the other, as both said by one channel."""

    here: int
    there: int


def _refuse_to_wait(*_: object) -> NoReturn:
    """What would be waited for comes by a thread that a forked process does not have."""
    raise UsageError(FORKED, hint=IN_A_FORK)


@final
class Connections:
    """Every channel of one worker."""

    def __init__(
        self,
        directory: Directory,
        job: str,
        secret: Secret,
        transports: Transports,
        listener: Listener,
        options: Options,
        clock: Clock,
        refusals: Refusals,
        wrap: Callable[[Channel], Channel] = lambda channel: channel,
    ) -> None:
        self._most_of_a_peer = options.limits.connections
        self._directory = directory
        self._wrap = wrap
        self._job, self._secret = job, secret
        self._transports = transports
        self._timeouts = options.timeouts
        self._clock = clock
        self._refusals = refusals
        self._acceptor = Acceptor(directory.me.name, listener, options, clock, refusals)
        self._lock = directory.lock
        self._ends = Ends(clock)
        self._dialling: dict[WorkerId, threading.RLock] = {}
        self._turns: dict[WorkerId, threading.RLock] = {}
        """held while a worker's first channel, or its loss, is told: one after the other"""
        self.channels: dict[WorkerId, list[Channel]] = {}
        """those to each worker; a list is replaced, never changed"""
        self._losses: Counter[WorkerId] = Counter()
        self._lost_us: Counter[WorkerId] = Counter()
        """how often each peer was lost in its life, and how often it has lost us, as it says"""
        self._threads = Threads(f"gradwire {directory.me.name}", directory.lock)
        self._closed = False
        self.on_joined: list[Callable[[WorkerId], None]] = []
        self.on_opened: Callable[[], None] = lambda: None
        self.on_reborn: Callable[[WorkerId, PeerLost], None] = lambda worker, error: None
        """told that a worker's earlier life is over, as a later one is there"""
        call_after_fork(self)

    def start(self, on_frame: OnFrame, on_end: OnEnd) -> None:
        """Begin to accept."""
        self._on_frame, self._on_end = on_frame, on_end
        self.lines = ChannelReaders(self._threads.spawn, self._take, self._ended)
        self._acceptor.open(self._threads.spawn, self._welcome)

    def to(self, worker: WorkerId, deadline: float) -> Channel:
        """A channel to this worker, dialled if there is none."""
        channels = self.channels.get(worker)
        if channels:
            return channels[0]
        with self._lock:
            dialling = self._dialling.setdefault(worker, threading.RLock())
        left = min(max(0.0, deadline - self._clock.now()), threading.TIMEOUT_MAX)
        if not dialling.acquire(timeout=left):
            name = self._directory.name(worker)
            raise DeadlinePassed(f"{self._directory.me.name} gave up waiting to dial {name}")
        try:
            while True:
                channels = self.channels.get(worker)
                if channels:
                    return channels[0]
                try:
                    return self._dial(worker, deadline)
                except _Overtaken:
                    if self._clock.now() >= deadline:
                        raise
        finally:
            dialling.release()

    def has(self, worker: WorkerId, channel: Channel | None = None) -> bool:
        """Whether the channel, or any, has not ended; that is known here before it is told."""
        known = self.channels.get(worker, ())
        return bool(known) if channel is None else channel in known

    def await_end(
        self, worker: WorkerId, channel: Channel | None, error: BaseException, deadline: float
    ) -> None:
        """Nothing can be sent by this channel, if this error says so: until its end is told."""
        if channel is not None and type(error) is PeerLost:  # others say it of a message only
            turn, ended = self._turn(worker), lambda: not self.has(worker, channel)
            self._ends.wait(self.lines, channel, ended, turn, deadline)

    def close(self, reason: str) -> None:
        """End every channel and join their threads; idempotent."""
        with self._lock:
            self._closed = True
            channels = [channel for known in self.channels.values() for channel in known]
        self._acceptor.close(reason)
        for channel in channels:
            channel.close(reason)
        self.lines.close()
        self._threads.join(_JOIN_SECONDS)

    def forked(self) -> None:
        """In a process forked from this one: use no channel, dial none, let nobody wait."""
        self._closed = True
        self.channels, self._turns, self._dialling = {}, {}, {}
        self.lines.forked()
        self.lines.wait = _refuse_to_wait  # type: ignore[method-assign,assignment]
        self.to = _refuse_to_wait  # type: ignore[method-assign,assignment]

    def _dial(self, worker: WorkerId, deadline: float) -> Channel:
        if worker == self._directory.me.id:
            near, far = MemoryNetwork().pair()
            self._adopt(worker, far)
            return self._adopt(worker, near)
        limit = min(deadline, self._clock.now() + self._timeouts.connect)
        me, name = self._directory.me.name, self._directory.name(worker)
        address = self._directory.address(worker)
        try:
            channel = self._transports.connect(address, limit, name)
        except GradwireError as error:
            error.about(name, link=address, phase="connect")
            raise
        until = time.monotonic() + limit - self._clock.now()  # a channel knows no other clock
        try:
            handshake.prove(channel, self._secret, self._job, me, name, until)
            here = self._greet(channel, worker, until)
            theirs = self._heard(channel, until)
            self._admit(introduction.check(theirs, name, self._directory, dialled=worker))
            self._greeted(worker, theirs)
        except BaseException as error:
            channel.close("the handshake failed")
            if not isinstance(error, GradwireError):
                raise
            raise self._no_handshake(name, channel, error, deadline) from error
        return self._adopt(worker, channel, _Greeted(here, theirs.losses))

    def _no_handshake(
        self, name: str, channel: Channel, error: GradwireError, deadline: float
    ) -> GradwireError:
        story = f"no handshake with {name} at {channel.remote}: {error.message}"
        if isinstance(error, NotTrusted):
            self._refusals.count("listener not trusted", channel.remote)
            kind: type[GradwireError] = NotTrusted
        else:
            kind = DeadlinePassed if self._clock.now() >= deadline else PeerLost
        found = kind(story, hint=error.hint)
        return found.about(name, link=channel.remote, phase="connect")

    def _welcome(self, channel: Channel, until: float) -> None:
        """Let in who connected, once it has shown who it is; or raise why not."""
        directory = self._directory
        name = handshake.examine(channel, self._secret, self._job, directory.me.name, until)
        self._acceptor.proven(channel)
        theirs = self._heard(channel, until)
        member = introduction.check(theirs, name, directory, dialled=None)
        self._admit(member)
        self._greeted(member.id, theirs)
        here = self._greet(channel, member.id, until)
        self._adopt(member.id, channel, _Greeted(here, theirs.losses))

    def _greet(self, channel: Channel, peer: WorkerId, deadline: float) -> int:
        """Say who we are; how often we have lost the peer, as it now knows."""
        with self._turn(peer):
            losses = self._losses[peer]
        said = encode(introduction.hello(self._directory, peer, losses))
        channel.send(Frame(kind_of(Hello), 0, 0, said, ()), deadline)
        return losses

    def _heard(self, channel: Channel, deadline: float) -> Hello:
        frame = channel.maybe_recv(deadline)
        if frame is None:
            raise DeadlinePassed(f"{channel.remote} did not introduce itself before the deadline")
        said = _HELLO.decode(frame.kind, frame.head)
        assert isinstance(said, Hello)
        return said

    def _turn(self, worker: WorkerId) -> threading.RLock:
        with self._lock:
            return self._turns.setdefault(worker, threading.RLock())

    def _admit(self, member: Member) -> None:
        """A peer whose earlier life we still speak with takes its place; that one is lost."""
        for worker in self._directory.admit(member):
            error = PeerLost(f"a new worker has taken the place of {self._directory.name(worker)}")
            with self._turn(worker):
                for channel in self._dropped(worker, error):
                    self._on_end(worker, channel, error, False)
                self._lost_us[worker] = 0
                self.on_reborn(worker, error)

    def _greeted(self, worker: WorkerId, theirs: Hello) -> None:
        """See Note [What was before a loss]: one that was frozen has not seen that it was lost."""
        self._directory.greeted(worker, theirs.life, theirs.since)
        with self._turn(worker):
            if theirs.losses > self._lost_us[worker]:
                self._lost_us[worker] = theirs.losses
                name = self._directory.name(worker)
                self.hang_up(worker, PeerLost(f"{name} has ended its connections with us"))

    def hang_up(self, worker: WorkerId, error: PeerLost) -> None:
        """End every channel to this worker; the next that is needed is dialled anew."""
        with self._turn(worker):
            channels = self._dropped(worker, error)
            for channel in channels:
                self._on_end(worker, channel, error, channel is channels[-1])

    def _dropped(self, worker: WorkerId, error: PeerLost) -> list[Channel]:
        """The channels to this worker, which are closed now."""
        with self._lock:
            channels = self.channels.pop(worker, [])
            self._losses[worker] += bool(channels)
            self._ends.noted()
        for channel in channels:
            channel.close(str(error))
        return channels

    def unreached(self, worker: WorkerId, tell: Callable[[], None]) -> bool:
        """A worker could not be reached: `tell` counts it as lost. False if it is connected."""
        with self._turn(worker):
            with self._lock:
                if self.channels.get(worker):
                    return False
                self._losses[worker] += 1
            tell()
        return True

    def _adopt(
        self, worker: WorkerId, channel: Channel, greeted: _Greeted | None = None
    ) -> Channel:
        channel = self._wrap(channel)
        with self._turn(worker):
            with self._lock:
                known = self.channels.get(worker, [])
                refusal = self._maybe_refused(worker, len(known), greeted)
                if refusal is None:
                    self.channels[worker] = [*known, channel]
            if refusal is None:
                for tell in self.on_joined if not known else ():
                    tell(worker)
                self.lines.open(worker, channel, self._directory.name(worker))
        if refusal is not None:
            channel.close(refusal.message)
            raise refusal
        self.on_opened()
        return channel

    def _maybe_refused(
        self, worker: WorkerId, known: int, greeted: _Greeted | None
    ) -> GradwireError | None:
        """Why a channel is not used, if so."""
        name = self._directory.name(worker)
        if self._closed:
            return PeerLost(f"{self._directory.me.name} has left")
        if known >= self._most_of_a_peer:
            return OverLimit(
                f"{name} has {known} connections with this worker",
                hint="close some, or raise Limits(connections=…)",
            )
        if greeted not in (None, (self._losses[worker], self._lost_us[worker])):
            return _Overtaken(f"{name} was lost while a connection to it was made")
        return None

    def give_up(self, line: ChannelReader, error: GradwireError) -> None:
        """Its peer is taken for gone: end the channel, whatever is still on its way."""
        self._ended(line, error)

    def _take(self, worker: WorkerId, channel: Channel, frame: Frame, may_run: bool) -> Job | None:
        if channel not in self.channels.get(worker, ()):
            self._refusals.count("earlier life", self._directory.name(worker))
            raise PeerLost("what is late of an earlier life is not read")
        return self._on_frame(worker, channel, frame, may_run)

    def _ended(self, line: ChannelReader, error: GradwireError) -> None:
        """With one channel to a worker all of them end, and the worker is lost.

        What was on its way is lost with a channel. Layers above are told of that by the loss of the
        worker, which therefore may not live on in another channel.
        """
        worker, channel = line.worker, line.channel
        with self._turn(worker):
            with self._lock:
                known = self.channels.get(worker, [])
                was_given_up = channel not in known
                if not was_given_up:
                    self.channels[worker] = []
                    self._losses[worker] += 1
                    self._ends.noted()
            channel.close(str(error))
            if was_given_up:
                return
            for other in known:
                if other is not channel:
                    other.close(f"another connection to the same worker ended: {error}")
                    self._on_end(worker, other, error, False)
            self._on_end(worker, channel, error, not self._closed)
