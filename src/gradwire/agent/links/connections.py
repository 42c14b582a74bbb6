"""The channels of one worker to its peers: dialled when first needed, kept until they end.

readers.py decides which thread reads a channel, and passes its frames to `on_frame`.

Note [Two that dial each other]: two workers that dial each other at once have two channels. Either
carries anything, but a thread that waits for a peer reads the channel on which it would send. If
the two sent on different ones, the answers to one-way messages (the gradients of a pass) would be
read by another thread, which has to wake the first: a pass took three times as long. So both use
the one that the lower worker has dialled: while that one dials, it does not complete the other.

Note [What was before a loss]: when one channel to a worker ends, all of them end, the worker counts
as lost, and the layers above drop their state about it. No message from before a loss may meet
state from after it. So the loss is reported before the next channel is used. Each Hello says how
often its sender has lost the other worker: a worker that did not notice a loss, as it was frozen,
learns of it there. A channel whose Hellos were exchanged before a loss is not used after it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import final

from gradwire import threads
from gradwire.agent.links import handshake
from gradwire.agent.links.readers import ChannelReader, ChannelReaders, OnFrame, refuse_to_wait
from gradwire.agent.links.traffic import Traffic
from gradwire.agent.messages import Hello
from gradwire.agent.peers.directory import Directory
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret
from gradwire.agent.requests.timer import Clock
from gradwire.errors import DeadlinePassed, GradwireError, NotTrusted, OverLimit, PeerLost
from gradwire.ids import WorkerId
from gradwire.options import Options
from gradwire.threads import Threads, call_after_fork
from gradwire.transport.address import Transports
from gradwire.transport.base import Channel, Listener
from gradwire.transport.memory import MemoryNetwork
from gradwire.wire.message import Frame, Kinds, encode, kind_of

_JOIN_SECONDS = 5.0
_NOTICE_SECONDS = 1.0  # how long a reader may take to find the end of its channel
_CONNECT_SECONDS = 0.02
_BOTH_DIAL_SECONDS = 0.5
"""How long a peer that has dialled us waits for our own dialling: until that has a connection, and
then until its handshake is over. If we cannot reach the peer, its channel is the only one."""
_HELLO = Kinds([Hello])
_log = logging.getLogger("gradwire")
_Losses = tuple[int, int] | None


class _LostMeanwhile(PeerLost):
    """A worker was lost while a channel to it was made; dialling again may succeed at once."""


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
    ) -> None:
        self._most_per_peer, self._seconds = options.limits.connections, options.timeouts.connect
        self._directory, self._transports = directory, transports
        self._job, self._secret = job, secret
        self._clock, self._refusals = clock, refusals
        self._acceptor = handshake.Acceptor(directory.me.name, listener, options, clock, refusals)
        self._lock = directory.lock
        self._removed_lock = threading.RLock()  # not the worker's, which wait() would release
        self._removed = threading.Condition(self._removed_lock)
        self._dial_locks: dict[WorkerId, threading.RLock] = {}
        self._greeting: set[WorkerId] = set()
        """those that were dialled and reached, until the new channel is in use"""
        self._peer_locks: dict[WorkerId, threading.RLock] = {}
        """each is held while its worker's first channel, or its loss, is reported: in this order"""
        self.channels: dict[WorkerId, list[Channel]] = {}
        """by worker; a list is replaced, never changed, so reading needs no lock; a channel is
        removed before its end is reported"""
        self._traffic = Traffic()
        self._losses: Counter[WorkerId] = Counter()
        self._their_losses: Counter[WorkerId] = Counter()
        """how often we lost each peer, and how often its present incarnation lost us, as it says"""
        self._threads = Threads(f"gradwire {directory.me.name}")
        self._closed = False
        call_after_fork(self)

    def start(
        self,
        *,
        on_frame: OnFrame,
        on_joined: Callable[[WorkerId], None],
        on_opened: Callable[[], None],
        on_end: Callable[[WorkerId, Channel, GradwireError, bool], None],
        on_reborn: Callable[[WorkerId, PeerLost], None],
        contexts_opened: Callable[[], int],
    ) -> None:
        """Begin to accept. The listeners must not block.

        `on_joined`: a worker has its first channel. `on_opened`: there is a new channel. `on_end`:
        a channel has ended, why, and whether it was the last to its worker. `on_reborn`: a later
        incarnation has connected. `contexts_opened`: see Note [Contexts and incarnations].
        """
        self._on_joined, self._on_opened = on_joined, on_opened
        self._on_end, self._on_reborn = on_end, on_reborn
        self._contexts_opened = contexts_opened
        self.readers = ChannelReaders(self._threads.spawn, on_frame, self.give_up)
        self._acceptor.open(self._threads.spawn, self._welcome)

    def to(self, worker: WorkerId, deadline: float) -> Channel:
        """A channel to this worker, dialled if there is none."""
        channels = self.channels.get(worker)
        if channels:
            return channels[0]
        dial_lock = self._dial_lock(worker)
        left = min(max(0.0, deadline - self._clock.now()), threading.TIMEOUT_MAX)
        if not dial_lock.acquire(timeout=left):
            name = self._directory.name(worker)
            raise DeadlinePassed(f"{self._directory.me.name} gave up waiting to dial {name}")
        try:
            while True:
                channels = self.channels.get(worker)
                if channels:
                    return channels[0]
                try:
                    dialled = self._dial(worker, deadline)
                    return self.channels.get(worker, [dialled])[0]
                except _LostMeanwhile:
                    if self._clock.now() >= deadline:
                        raise
        finally:
            self._greeting.discard(worker)
            dial_lock.release()

    def await_end(
        self, worker: WorkerId, channel: Channel | None, error: BaseException, deadline: float
    ) -> None:
        """Sending on a channel failed: if the error says that it has ended, wait for the report.

        A reader finds the end a moment later, behind what the peer sent before. Until then the
        worker counts as connected by this channel, and another try would fail again.
        """
        if channel is None or type(error) is not PeerLost:  # a subclass is about one message
            return
        until = min(deadline, self._clock.now() + _NOTICE_SECONDS)

        def has_ended() -> bool:
            return channel not in self.channels.get(worker, ())

        def sleep() -> None:
            with self._removed_lock:
                while not has_ended() and (left := until - self._clock.now()) > 0:
                    self._removed.wait(left)

        self.readers.wait(channel, has_ended, sleep)
        reporting = self._peer_lock(worker)  # held by the thread that reports the end
        if reporting.acquire(timeout=max(0.0, until - self._clock.now())):
            reporting.release()

    def read_some(self, peer: WorkerId) -> None:
        """Handle what has come from a peer, if no thread reads; does not wait."""
        if known := self.channels.get(peer):
            self.readers.read_some(known[0])

    def close(self, reason: str) -> None:
        """End every channel and join their threads; idempotent."""
        with self._lock:
            self._closed = True
            channels = [channel for known in self.channels.values() for channel in known]
        self._acceptor.close(reason)
        for channel in channels:
            channel.close(reason)
        self.readers.close()
        self._threads.join(_JOIN_SECONDS)

    def forked(self) -> None:
        """In a process forked from this one: use no channel, dial none, refuse to wait."""
        self._closed = True
        self.channels, self._peer_locks, self._dial_locks = {}, {}, {}
        self.readers.forked()
        self.to = refuse_to_wait  # type: ignore[method-assign,assignment]

    def _dial(self, worker: WorkerId, deadline: float) -> Channel:
        if worker == self._directory.me.id:
            near, far = MemoryNetwork().pair()
            self._use(worker, far)
            return self._use(worker, near)
        limit = min(deadline, self._clock.now() + self._seconds)
        me, name = self._directory.me.name, self._directory.name(worker)
        address = self._directory.address(worker)
        try:
            channel = self._transports.connect(address, limit, name)
        except GradwireError as error:
            if isinstance(error, NotTrusted):
                self._note_distrust(address, error)
            error.about(name, link=address, phase="connect")
            raise
        if known := self.channels.get(worker):  # it has dialled us meanwhile
            channel.close("it is not needed any more")
            return known[0]
        until = time.monotonic() + limit - self._clock.now()  # channels use this clock
        self._greeting.add(worker)
        try:
            handshake.prove(channel, self._secret, self._job, me, name, until)
            here = self._send_hello(channel, worker, until)
            theirs = self._receive_hello(channel, name, until, dialled=worker)
        except BaseException as error:
            channel.close("the handshake failed")
            if not isinstance(error, GradwireError):
                raise
            kind: type[GradwireError] = PeerLost
            if isinstance(error, NotTrusted):
                self._note_distrust(channel.remote, error)
                kind = NotTrusted
            elif self._clock.now() >= deadline:
                kind = DeadlinePassed
            message = f"no handshake with {name} at {channel.remote}: {error.message}"
            failed = kind(message, hint=error.hint)
            raise failed.about(name, link=channel.remote, phase="connect") from error
        return self._use(worker, channel, (here, theirs.losses))

    def _note_distrust(self, remote: str, error: NotTrusted) -> None:
        """Count it, and log the reason the first time: a caller may not show the error."""
        if self._refusals.count("listener not trusted", remote):
            me = self._directory.me.name
            _log.warning("%s made no connection to %s: %s", me, remote, str(error))

    def _welcome(self, channel: Channel, until: float) -> None:
        """Use a channel that a peer dialled, if the handshake succeeds; else raise why."""
        me = self._directory.me.name
        name = handshake.examine(channel, self._secret, self._job, me, until)
        self._acceptor.proven(channel)
        theirs = self._receive_hello(channel, name, until)
        worker, dial_lock, is_ours = theirs.worker, None, False
        if self._directory.me.id < worker:  # see Note [Two that dial each other]
            dial_lock = self._dial_lock(worker)
            is_ours = dial_lock.acquire(timeout=_CONNECT_SECONDS)
            if not is_ours and worker in self._greeting:
                is_ours = dial_lock.acquire(timeout=_BOTH_DIAL_SECONDS)
        try:
            # Under the lock: once the Hello is there, the peer may complete what we have dialled.
            with self._peer_lock(worker):
                here = self._send_hello(channel, worker, until)
                self._use(worker, channel, (here, theirs.losses))
        finally:
            if dial_lock is not None and is_ours:
                dial_lock.release()

    def _send_hello(self, channel: Channel, peer: WorkerId, deadline: float) -> int:
        """Send our Hello; returns how often we have lost the peer, as the Hello says."""
        with self._peer_lock(peer):
            losses = self._losses[peer]
        me = self._directory.myself
        since = self._contexts_opened() if self._directory.had_earlier(peer) else 0
        said = Hello(me.id, me.incarnation, me.address, me.note, since, losses)
        channel.send(Frame(kind_of(Hello), 0, 0, encode(said), ()), deadline)
        return losses

    def _receive_hello(
        self, channel: Channel, name: str, deadline: float, dialled: WorkerId | None = None
    ) -> Hello:
        """The Hello of the worker of this name; an earlier incarnation that it replaces is lost."""
        frame = channel.maybe_recv(deadline)
        if frame is None:
            raise DeadlinePassed(f"{channel.remote} did not introduce itself before the deadline")
        theirs = _HELLO.decode(frame.kind, frame.head)
        assert isinstance(theirs, Hello)
        member = handshake.check_hello(theirs, name, self._directory, dialled=dialled)
        for replaced in self._directory.admit(member):
            place = self._directory.name(replaced)
            error = PeerLost(f"a new worker has taken the place of {place}")
            with self._peer_lock(replaced):
                for ended in self._drop(replaced, error):
                    self._on_end(replaced, ended, error, False)
                self._their_losses[replaced] = 0
                self._on_reborn(replaced, error)
        worker = theirs.worker
        self._directory.greeted(worker, theirs.incarnation, theirs.since)
        with self._peer_lock(worker):  # see Note [What was before a loss]
            if theirs.losses > self._their_losses[worker]:
                self._their_losses[worker] = theirs.losses
                self.hang_up(worker, PeerLost(f"{name} has ended its connections with us"))
        return theirs

    def _dial_lock(self, worker: WorkerId) -> threading.RLock:
        return self._dial_locks.setdefault(worker, threading.RLock())

    def _peer_lock(self, worker: WorkerId) -> threading.RLock:
        return self._peer_locks.setdefault(worker, threading.RLock())

    def hang_up(self, worker: WorkerId, error: GradwireError) -> None:
        """End every channel to this worker; the next message dials again."""
        with self._peer_lock(worker):
            channels = self._drop(worker, error)
            for channel in channels:
                is_lost = channel is channels[-1] and not self._closed
                self._on_end(worker, channel, error, is_lost)

    def _drop(self, worker: WorkerId, error: GradwireError) -> list[Channel]:
        """Remove and close the channels to this worker; returns them."""
        with self._lock:
            channels = self.channels.pop(worker, [])
            self._traffic.ended(worker, channels)
            self._losses[worker] += bool(channels)
            with self._removed_lock:
                self._removed.notify_all()
        for channel in channels:
            channel.close(str(error))
        return channels

    def traffic(self) -> dict[tuple[WorkerId, str], tuple[int, int]]:
        """The bytes sent and received, by peer and way, over the channels of now and before."""
        with self._lock:
            return self._traffic.with_open(self.channels)

    def losses(self) -> dict[WorkerId, int]:
        """How often each peer was lost."""
        with self._lock:
            return dict(self._losses)

    def shared_bytes(self) -> int:
        """The shared memory that this worker has made for its peers."""
        with self._lock:
            channels = [channel for known in self.channels.values() for channel in known]
        return sum(channel.shared_bytes for channel in channels)

    def unreached(self, worker: WorkerId, tell: Callable[[], None]) -> bool:
        """A worker could not be reached: call `tell`, which marks it as lost, unless connected."""
        with self._peer_lock(worker):
            with self._lock:
                if self.channels.get(worker):
                    return False
                self._losses[worker] += 1
            tell()
        return True

    def _use(self, worker: WorkerId, channel: Channel, losses: _Losses = None) -> Channel:
        """Put a channel to use; `losses` is what our Hello and the peer's on it have said."""
        # Listeners run with the peer's lock held, though not with the worker's. Without it a loss
        # could overtake the join that came before it, or a frame of the new channel the report of
        # the last loss. So listeners must not block, nor wait for anything that takes this lock.
        try:
            with threads.needed_by_others(), self._peer_lock(worker):
                with self._lock:
                    known = self.channels.get(worker, [])
                    self._check_usable(worker, len(known), losses)
                    self.channels[worker] = [*known, channel]
                if not known:
                    self._on_joined(worker)
                self.readers.open(worker, channel, self._directory.name(worker))
        except GradwireError as refusal:
            channel.close(refusal.message)
            raise
        self._on_opened()
        return channel

    def _check_usable(self, worker: WorkerId, known: int, losses: _Losses) -> None:
        name = self._directory.name(worker)
        if self._closed:
            raise PeerLost(f"{self._directory.me.name} has left")
        if known >= self._most_per_peer and worker != self._directory.me.id:
            raise OverLimit(
                f"{name} has {known} connections with this worker",
                hint="close some, or raise Limits(connections=…)",
            )
        if losses not in (None, (self._losses[worker], self._their_losses[worker])):
            raise _LostMeanwhile(f"{name} was lost while a connection to it was made")

    def give_up(self, reader: ChannelReader, error: GradwireError) -> None:
        """A channel has ended, or its peer is considered dead: end all channels to the worker.

        Frames in flight are lost with a channel. The layers above learn of that only by the loss of
        the worker, so it must not stay connected by another channel.
        """
        worker, channel = reader.worker, reader.channel
        with self._peer_lock(worker):
            channel.close(str(error))
            known = self.channels.get(worker, [])
            if channel in known:  # as the last one, which is reported as the link that was lost
                others = [other for other in known if other is not channel]
                self.channels[worker] = [*others, channel]
                self.hang_up(worker, error)
