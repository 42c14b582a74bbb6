"""Channels to peers: made when first needed, until they end. Who reads them is in lines.py.

Between two workers there may be two channels, when both dialled at once; either carries anything.
What a frame means is not known here: it is handed to `on_frame` together with whence it came.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent import handshake
from gradwire.agent.clock import Clock
from gradwire.agent.directory import Directory
from gradwire.agent.lines import Line, Lines, OnFrame
from gradwire.agent.members_state import Member
from gradwire.agent.messages import Hello
from gradwire.agent.pool import Job
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost
from gradwire.ids import WorkerId
from gradwire.options import Timeouts
from gradwire.transport.address import Transports
from gradwire.transport.base import Channel, Listener
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.frame import Frame
from gradwire.wire.message import Kinds, encode, kind_of

_log = logging.getLogger("gradwire")

OnEnd = Callable[[WorkerId, Channel, GradwireError, bool], None]
"""Told that a channel to a worker ended, why, and whether it was the last one to that worker."""

_JOIN_SECONDS = 5.0
_HELLO = Kinds([Hello])


@final
class Connections:
    """Every channel of one worker."""

    def __init__(
        self,
        directory: Directory,
        job: str,
        transports: Transports,
        listener: Listener,
        timeouts: Timeouts,
        clock: Clock,
        wrap: Callable[[Channel], Channel] = lambda channel: channel,
    ) -> None:
        self._directory = directory
        self._wrap = wrap
        self._job = job
        self._transports = transports
        self._listener = listener
        self._timeouts = timeouts
        self._clock = clock
        self._lock = threading.Lock()
        self._dialling: dict[WorkerId, threading.Lock] = {}
        self._channels: dict[WorkerId, list[Channel]] = {}
        self._greeting: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self.on_joined: Callable[[WorkerId], None] = lambda _: None

    def start(self, on_frame: OnFrame, on_end: OnEnd) -> None:
        """Begin to accept."""
        self._on_frame, self._on_end = on_frame, on_end
        self.lines = Lines(self._spawn, self._take, self._ended)
        self._spawn("accept", self._accept_loop)

    def to(self, worker: WorkerId, deadline: float) -> Channel:
        """A channel to this worker, dialled if there is none."""
        channels = self._channels.get(worker)
        if channels:
            return channels[0]
        with self._lock:
            dialling = self._dialling.setdefault(worker, threading.Lock())
        left = min(max(0.0, deadline - self._clock.now()), threading.TIMEOUT_MAX)
        if not dialling.acquire(timeout=left):
            name = self._directory.name(worker)
            raise DeadlinePassed(f"{self._directory.me.name} gave up waiting to dial {name}")
        try:
            channels = self._channels.get(worker)
            return channels[0] if channels else self._dial(worker, deadline)
        finally:
            dialling.release()

    def has(self, worker: WorkerId, channel: Channel | None = None) -> bool:
        """Whether the channel, or any, has not ended; that is known here before it is told."""
        known = self._channels.get(worker, ())
        return bool(known) if channel is None else channel in known

    def wait(self, worker: WorkerId, done: Callable[[], bool], block: Callable[[], object]) -> None:
        """Until `done`, by what comes from this worker; see `Lines.wait`."""
        channels = self._channels.get(worker)
        if channels:
            self.lines.wait(channels[0], done, block)
        else:
            block()

    def close(self, reason: str) -> None:
        """End every channel and join their threads; idempotent."""
        with self._lock:
            self._closed = True
            channels = [channel for known in self._channels.values() for channel in known]
            channels += self._greeting
            threads = self._threads - {threading.current_thread()}
        self._listener.close()
        for channel in channels:
            channel.close(reason)
        self.lines.close()
        for thread in threads:
            thread.join(_JOIN_SECONDS)

    def _dial(self, worker: WorkerId, deadline: float) -> Channel:
        if worker == self._directory.me.id:
            near, far = MemoryNetwork().pair()
            self._adopt(worker, far)
            return self._adopt(worker, near)
        limit = min(deadline, self._clock.now() + self._timeouts.connect)
        channel = self._transports.connect(self._directory.address(worker), limit)
        try:
            self._greet(channel, self._directory.name(worker), limit)
            theirs = self._heard(channel, limit)
            self._admit(handshake.check(theirs, self._directory, self._job, dialled=worker))
        except BaseException as error:
            channel.close("the handshake failed")
            if not isinstance(error, GradwireError):
                raise
            story = f"no handshake with {self._directory.name(worker)} at {channel.remote}: {error}"
            if self._clock.now() >= deadline:
                raise DeadlinePassed(story) from error
            raise PeerLost(story) from error
        return self._adopt(worker, channel)

    def _welcome(self, channel: Channel) -> None:
        limit = self._clock.now() + self._timeouts.connect
        with self._lock:
            self._greeting.add(channel)
        try:
            theirs = self._heard(channel, limit)
            member = handshake.check(theirs, self._directory, self._job, dialled=None)
            self._admit(member)
            self._greet(channel, theirs.name, limit)
            self._adopt(member.id, channel)
        except GradwireError:
            channel.close("the handshake failed")
        finally:
            with self._lock:
                self._greeting.discard(channel)

    def _greet(self, channel: Channel, to: str, deadline: float) -> None:
        said = encode(handshake.hello(self._directory, self._job, to))
        channel.send(Frame(kind_of(Hello), 0, 0, said, ()), deadline)

    def _heard(self, channel: Channel, deadline: float) -> Hello:
        """The peer's Hello. A peer that says nothing is cut off at the deadline."""
        cut = threading.Timer(
            max(0.0, deadline - self._clock.now()), channel.close, ["no handshake"]
        )
        cut.name = f"gradwire {self._directory.me.name} handshake"
        cut.daemon = True
        cut.start()
        try:
            frame = channel.recv()
        finally:
            cut.cancel()
            cut.join()
        said = _HELLO.decode(frame.kind, frame.head)
        assert isinstance(said, Hello)
        return said

    def _admit(self, member: Member) -> None:
        """A peer whose earlier life we still speak with takes its place; that one is lost."""
        for worker in self._directory.admit(member):
            with self._lock:
                channels = self._channels.pop(worker, [])
            error = PeerLost(f"a new worker has taken the place of {self._directory.name(worker)}")
            for channel in channels:
                channel.close(str(error))
                self._on_end(worker, channel, error, channel is channels[-1])

    def _adopt(self, worker: WorkerId, channel: Channel) -> Channel:
        channel = self._wrap(channel)
        with self._lock:
            closed, known = self._closed, self._channels.get(worker, [])
            if not closed:
                self._channels[worker] = [*known, channel]
        if closed:
            channel.close("this worker has left")
            raise PeerLost(f"{self._directory.me.name} has left")
        if not known:
            self.on_joined(worker)
        self.lines.open(worker, channel, self._directory.name(worker))
        return channel

    def _accept_loop(self) -> None:
        while True:
            try:
                channel = self._listener.accept()
            except PeerLost:
                return
            self._spawn("greet", partial(self._welcome, channel))

    def _take(self, worker: WorkerId, channel: Channel, frame: Frame, may_run: bool) -> Job | None:
        if not self.has(worker, channel):
            raise PeerLost("what is late of an earlier life is not read")
        return self._on_frame(worker, channel, frame, may_run)

    def _ended(self, line: Line, error: GradwireError) -> None:
        """With one channel to a worker all of them end, and the worker is lost.

        What was on its way is lost with a channel. Layers above are told of that by the loss of the
        worker, which therefore may not live on in another channel.
        """
        worker, channel = line.worker, line.channel
        with self._lock:
            known = self._channels.get(worker, [])
            was_given_up = channel not in known
            if not was_given_up:
                self._channels[worker] = []
        channel.close(str(error))
        if was_given_up:
            return
        for other in known:
            if other is not channel:
                other.close(f"another connection to the same worker ended: {error}")
                self._on_end(worker, other, error, False)
        self._on_end(worker, channel, error, not self._closed)

    def _spawn(self, what: str, target: Callable[[], None]) -> None:
        name = f"gradwire {self._directory.me.name} {what}"

        def run() -> None:
            try:
                target()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:  # or close() could find a thread that cannot be joined yet
            self._threads.add(thread)
            thread.start()
