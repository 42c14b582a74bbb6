"""Heartbeats between workers that exchange nothing else: the driver of heartbeat_state.py.

It runs on the timer's thread, and looks at how many frames each channel has received. Pings and
pongs are sent by service threads, which no function of a user keeps busy.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import final

from gradwire.agent.links.connections import Connections
from gradwire.agent.links.readers import ChannelReader
from gradwire.agent.membership.heartbeat_state import FailureDetector
from gradwire.agent.messages import Ping
from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.timer import Timer
from gradwire.agent.serving.dispatch import Dispatch, Lane, Payload, Source
from gradwire.errors import GradwireError, PeerLost
from gradwire.events import Events
from gradwire.ids import WorkerId
from gradwire.options import Timeouts
from gradwire.transport.base import Channel
from gradwire.wire.message import Frame, encode, kind_of

_log = logging.getLogger("gradwire")


@final
class Heartbeat:
    """Finds the peers of one worker that are frozen, or cannot be reached any more."""

    def __init__(
        self,
        directory: Directory,
        connections: Connections,
        dispatch: Dispatch,
        timer: Timer,
        events: Events,
        timeouts: Timeouts,
    ) -> None:
        self._directory, self._connections = directory, connections
        self._timer, self._events, self._submit = timer, events, dispatch.service.submit
        self._detector = FailureDetector[ChannelReader](timeouts.suspect, timeouts.dead)
        dispatch.handle(Ping, self._serve_ping, Lane.SERVICE)
        timer.watch(self._look)

    def channel_opened(self) -> None:
        """There is a channel to watch: let the timer run from now on."""
        self._timer.need(self._timer.clock.now() + self._detector.pause)

    def _look(self, now: float) -> float | None:
        next_look = self._detector.next_look()
        if next_look is not None and now < next_look:
            return next_look  # the timer was woken for something else
        readers = [r for r in self._connections.readers.all() if r.worker != self._directory.me.id]
        signs = {r: r.reads if r.channel.needs_heartbeat else None for r in readers}
        found = self._detector.look(now, signs)
        for reader in found.ping:
            self._submit(partial(_ping, reader.channel, asks=True))
        for reader, silence in found.suspect.items():
            self._report(reader, f"has given no sign of life for {silence:.3g} s")
        for reader in found.back:
            self._report(reader, "is heard again")
        for reader, silence in found.dead.items():
            error = PeerLost(f"no sign of life for {silence:.3g} s")
            self._submit(partial(self._connections.give_up, reader, error))
        return self._detector.next_look()

    def silence_of(self, worker: WorkerId) -> float:
        """How long a worker has been silent, if that is suspect; else 0."""
        now = self._timer.clock.now()
        readers = [r for r in self._connections.readers.all() if r.worker == worker]
        return min((self._detector.silence(reader, now) for reader in readers), default=0.0)

    def silences(self) -> dict[WorkerId, float]:
        """The same for each connected worker."""
        now, found = self._timer.clock.now(), dict[WorkerId, float]()
        for reader in self._connections.readers.all():
            silence = self._detector.silence(reader, now)
            found[reader.worker] = min(silence, found.get(reader.worker, silence))
        return found

    def _report(self, reader: ChannelReader, what: str) -> None:
        name, me = self._directory.name(reader.worker), self._directory.me.name
        self._events.note("heartbeat", what, name)
        _log.warning("%s: %s %s (%s)", me, name, what, reader.channel.remote)

    def _serve_ping(self, ping: Ping, _: Payload, source: Source) -> None:
        if ping.asks:
            _ping(source.channel, asks=False)


def _ping(channel: Channel, *, asks: bool) -> None:
    """Send a ping, or a pong, unless the channel is full: then other frames are signs of life."""
    with suppress(GradwireError):
        channel.send(Frame(kind_of(Ping), 0, 0, encode(Ping(asks)), ()), 0.0)
