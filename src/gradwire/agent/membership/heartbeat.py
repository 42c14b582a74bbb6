"""Signs of life between workers that say nothing: the driver of heartbeat_state.py.

It runs on the timer's thread, and looks at how many messages each line has had. What it has to say
leaves from service threads, which no function of a user's keeps waiting; so does the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.links.connections import Connections
from gradwire.agent.links.readers import ChannelReader
from gradwire.agent.membership.heartbeat_state import FailureDetector, Patience
from gradwire.agent.messages import Ping
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import GradwireError, PeerLost
from gradwire.options import Timeouts
from gradwire.transport.base import Channel
from gradwire.wire.frame import Frame
from gradwire.wire.message import encode, kind_of

_log = logging.getLogger("gradwire")


@final
class Pulses:
    """Finds the peers of one worker that are frozen, or cannot be reached any more."""

    def __init__(self, agent: Agent, connections: Connections, timeouts: Timeouts) -> None:
        self._agent, self._connections = agent, connections
        self._me = agent.directory.me
        self._pulse: FailureDetector[ChannelReader] = FailureDetector(
            Patience(timeouts.suspect, timeouts.dead)
        )
        agent.handle(Ping, self._serve, Lane.SERVICE)
        agent.timer.watch(self._look)
        agent.silence_of = self._silence_of
        connections.on_opened = self._wake

    def _wake(self) -> None:
        """There is a link to watch: at the latest now the timer runs."""
        self._agent.timer.need(self._agent.clock.now() + self._pulse.pause)

    def _look(self, now: float) -> float | None:
        next_look = self._pulse.next_look()
        if next_look is not None and now < next_look:
            return next_look  # the timer was woken for something else
        lines = [line for line in self._connections.lines.all() if line.worker != self._me.id]
        found = self._pulse.look(now, {line: _sign(line) for line in lines})
        for line in found.ask:
            self._submit(partial(_beat, line.channel, asks=True))
        for line, silence in found.suspect.items():
            self._say(line, f"has given no sign of life for {silence:.3g} s")
        for line in found.back:
            self._say(line, "is heard again")
        for line, silence in found.dead.items():
            error = PeerLost(f"no sign of life for {silence:.3g} s")
            self._submit(partial(self._connections.give_up, line, error))
        return self._pulse.next_look()

    def _silence_of(self, worker: int) -> float:
        """How long a worker has been silent, if that is suspect."""
        now = self._agent.clock.now()
        links = [line for line in self._connections.lines.all() if line.worker == worker]
        return min((self._pulse.silence(link, now) for link in links), default=0.0)

    def _say(self, line: ChannelReader, what: str) -> None:
        name = self._agent.directory.name(line.worker)
        self._agent.events.emit("pulse", name, what)
        _log.warning("%s: %s %s (%s)", self._me.name, name, what, line.channel.remote)

    def _submit(self, job: Callable[[], None]) -> None:
        self._agent.dispatch.service.submit(job)

    def _serve(self, beat: Ping, _: Payload, source: Source) -> None:
        if beat.asks:
            _beat(source.channel, asks=False)


def _sign(line: ChannelReader) -> int | None:
    return None if line.channel.watches_itself else line.reads


def _beat(channel: Channel, *, asks: bool) -> None:
    """Send one if it can leave at once. If not, other things are on their way there, and do."""
    try:
        channel.send(Frame(kind_of(Ping), 0, 0, encode(Ping(asks)), ()), 0.0)
    except GradwireError:
        return
