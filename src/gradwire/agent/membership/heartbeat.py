"""Heartbeats between workers that exchange nothing else: the driver of heartbeat_state.py.

It runs on the timer's thread, and looks at how many frames each channel has received. Pings and
pongs are sent by service threads, which no function of a user keeps busy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.links.connections import Connections
from gradwire.agent.links.readers import ChannelReader
from gradwire.agent.membership.heartbeat_state import FailureDetector, SilenceLimits
from gradwire.agent.messages import Ping
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import GradwireError, PeerLost
from gradwire.options import Timeouts
from gradwire.transport.base import Channel
from gradwire.wire.message import Frame, encode, kind_of

_log = logging.getLogger("gradwire")


@final
class Heartbeat:
    """Finds the peers of one worker that are frozen, or cannot be reached any more."""

    def __init__(self, agent: Agent, connections: Connections, timeouts: Timeouts) -> None:
        self._agent, self._connections = agent, connections
        self._me = agent.directory.me
        self._detector: FailureDetector[ChannelReader] = FailureDetector(
            SilenceLimits(timeouts.suspect, timeouts.dead)
        )
        agent.handle(Ping, self._serve_ping, Lane.SERVICE)
        agent.timer.watch(self._look)
        agent.silence_of = self._silence_of
        connections.on_channel_opened(self._start_timer)

    def _start_timer(self) -> None:
        """There is a channel to watch: let the timer run from now on."""
        self._agent.timer.need(self._agent.clock.now() + self._detector.pause)

    def _look(self, now: float) -> float | None:
        next_look = self._detector.next_look()
        if next_look is not None and now < next_look:
            return next_look  # the timer was woken for something else
        readers = [r for r in self._connections.readers.all() if r.worker != self._me.id]
        found = self._detector.look(now, {reader: _sign(reader) for reader in readers})
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

    def _silence_of(self, worker: int) -> float:
        """How long a worker has been silent, if that is suspect; else 0."""
        now = self._agent.clock.now()
        readers = [r for r in self._connections.readers.all() if r.worker == worker]
        return min((self._detector.silence(reader, now) for reader in readers), default=0.0)

    def _report(self, reader: ChannelReader, what: str) -> None:
        name = self._agent.directory.name(reader.worker)
        self._agent.events.emit("heartbeat", name, what)
        _log.warning("%s: %s %s (%s)", self._me.name, name, what, reader.channel.remote)

    def _submit(self, job: Callable[[], None]) -> None:
        self._agent.dispatch.service.submit(job)

    def _serve_ping(self, ping: Ping, _: Payload, source: Source) -> None:
        if ping.asks:
            _ping(source.channel, asks=False)


def _sign(reader: ChannelReader) -> int | None:
    return reader.reads if reader.channel.needs_heartbeat else None


def _ping(channel: Channel, *, asks: bool) -> None:
    """Send a ping, or a pong, unless the channel is full: then other frames are signs of life."""
    try:
        channel.send(Frame(kind_of(Ping), 0, 0, encode(Ping(asks)), ()), 0.0)
    except GradwireError:
        return
