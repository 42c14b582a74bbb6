"""Where peers arrive, and what becomes of those that do not show who they are.

Each gets a thread of its own for as long as that takes. There is room for a bounded number, and
each has a few seconds: whoever is already let in does not notice a crowd out there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.links.handshake_state import PendingHandshakes, Refusal
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.requests.timer import Clock
from gradwire.errors import BadMessage, DeadlinePassed, GradwireError, PeerLost
from gradwire.options import Options
from gradwire.transport.base import Channel, Listener

_FAIR_SECONDS = 1.0
"""What each has at least, however many wait behind it."""
_log = logging.getLogger("gradwire")

Spawn = Callable[[str, Callable[[], None]], None]
Welcome = Callable[[Channel, float], None]


@final
class Acceptor:
    """The listener of one worker, and who stands before it."""

    def __init__(
        self, me: str, listener: Listener, options: Options, clock: Clock, refusals: Refusals
    ) -> None:
        self._me, self._listener, self._clock = me, listener, clock
        self._refusals = refusals
        self._seconds = options.timeouts.handshake
        fair = min(_FAIR_SECONDS, self._seconds)
        self._pending_handshakes: PendingHandshakes[Channel] = PendingHandshakes(
            options.limits.pending_handshakes, fair
        )
        self._there: set[Channel] = set()
        """also those that have shown who they are, but were not introduced yet"""
        self._changed = threading.Condition()
        self._closed = False

    def open(self, spawn: Spawn, welcome: Welcome) -> None:
        """Begin to accept. `welcome(channel, deadline)` lets one in, or raises why it does not.

        That deadline is on the clock of channels.
        """
        self._spawn, self._welcome = spawn, welcome
        self._spawn("accept", self._accept)

    def close(self, reason: str) -> None:
        """Accept no more, and send away who stands there; idempotent."""
        with self._changed:
            self._closed = True
            there = list(self._there)
            self._changed.notify_all()
        self._listener.close()
        for channel in there:
            channel.close(reason)

    def proven(self, channel: Channel) -> None:
        """It has shown who it is, and does not stand in anybody's way; PeerLost if that is late."""
        with self._changed:
            if not self._pending_handshakes.has(channel):
                raise PeerLost("it was sent away meanwhile")
            self._pending_handshakes.gone(channel)
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                channel = self._listener.accept()
            except PeerLost:
                return
            if not self._take(channel):
                channel.close("this worker has left")
                return
            try:
                self._spawn("greet", partial(self._greet, channel))
            except RuntimeError as error:  # no thread to be had: later ones may have more luck
                self._refuse("no thread", channel, str(error))
                self._gone(channel)

    def _take(self, channel: Channel) -> bool:
        """Wait until there is room for it; False if this worker leaves meanwhile."""
        while True:
            with self._changed:
                now = self._clock.now()
                late = self._pending_handshakes.maybe_overdue(now)
                if late is not None:
                    self._pending_handshakes.gone(late)
                if self._closed or self._pending_handshakes.has_room:
                    self._pending_handshakes.came(channel, now)
                    self._there.add(channel)
                    break
                self._clock.sleep(self._changed, self._pending_handshakes.next_due())
        if late is not None:
            self._refuse("crowd", late, "it said nothing, and others waited")
        return not self._closed

    def _gone(self, channel: Channel) -> None:
        with self._changed:
            self._pending_handshakes.gone(channel)
            self._there.discard(channel)
            self._changed.notify_all()

    def _greet(self, channel: Channel) -> None:
        try:
            self._welcome(channel, time.monotonic() + self._seconds)
        except Refusal as refusal:
            self._refuse(refusal.reason.name.lower(), channel, refusal.message)
        except DeadlinePassed:
            self._refuse("slow", channel, f"it did not show who it is within {self._seconds:g} s")
        except BadMessage as error:
            self._refuse("introduction", channel, error.message)
        except GradwireError:  # it left, or we do: whoever only looks whether we are alive does so
            channel.close("the handshake failed")
        finally:
            self._gone(channel)

    def _refuse(self, kind: str, channel: Channel, why: str) -> None:
        channel.close(f"the handshake failed: {why}")
        if self._refusals.count(kind, _place(channel.remote)):
            _log.warning("%s refused %s: %s", self._me, channel.remote, why)


def _place(remote: str) -> str:
    """Whence it came, without the port or process that is another one each time."""
    place = remote.partition(" (")[0]
    return place.rpartition(":")[0] if place.startswith("tcp:") else place
