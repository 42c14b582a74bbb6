"""Accepts connections, and runs the handshake of each.

Each handshake has a thread of its own, and a few seconds. Their number is bounded, so that many
unauthenticated connections do not disturb the peers that are already connected.
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
from gradwire.threads import IRREPLACEABLE, Spawn
from gradwire.transport.base import Channel, Listener

_FAIR_SECONDS = 1.0
"""The least that each handshake gets, however many connections wait behind it."""
_log = logging.getLogger("gradwire")

Handshake = Callable[[Channel, float], None]


@final
class Acceptor:
    """The listener of one worker, and the handshakes of the connections it accepted."""

    def __init__(
        self, me: str, listener: Listener, options: Options, clock: Clock, refusals: Refusals
    ) -> None:
        self._me, self._listener, self._clock, self._refusals = me, listener, clock, refusals
        self._seconds = options.timeouts.handshake
        self._pending_handshakes: PendingHandshakes[Channel] = PendingHandshakes(
            options.limits.pending_handshakes, min(_FAIR_SECONDS, self._seconds)
        )
        self._unfinished: set[Channel] = set()
        """channels that are not in use yet, those with a proof but without a Hello included"""
        self._changed = threading.Condition()
        self._closed = False

    def open(self, spawn: Spawn, handshake: Handshake) -> None:
        """Begin to accept. `handshake(channel, deadline)` puts a channel to use, or raises why not.

        That deadline is in the time of `time.monotonic`, which channels use.
        """
        self._spawn, self._complete = spawn, handshake
        # A finalizer on these threads may call through a connection that waits for them.
        self._spawn("accept", self._accept, IRREPLACEABLE)

    def close(self, reason: str) -> None:
        """Accept no more, and close the channels whose handshake is unfinished; idempotent."""
        with self._changed:
            self._closed = True
            unfinished = list(self._unfinished)
            self._changed.notify_all()
        self._listener.close()
        for channel in unfinished:
            channel.close(reason)

    def proven(self, channel: Channel) -> None:
        """A peer has given its proof, so its place is free; PeerLost if it was closed before."""
        with self._changed:
            if not self._pending_handshakes.has(channel):
                raise PeerLost("it was closed meanwhile to make room for others")
            self._pending_handshakes.remove(channel)
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                channel = self._listener.accept()
            except PeerLost:
                return
            if not self._admit(channel):
                channel.close("this worker has left")
                return
            try:
                self._spawn("handshake", partial(self._handshake, channel), IRREPLACEABLE)
            except RuntimeError as error:  # the system has no thread left; it may have one later
                self._refuse("no thread", channel, str(error))
                self._remove(channel)

    def _admit(self, channel: Channel) -> bool:
        """Wait until there is room for one more handshake; False if this worker leaves."""
        while True:
            with self._changed:
                now = self._clock.now()
                late = self._pending_handshakes.maybe_overdue(now)
                if late is not None:
                    self._pending_handshakes.remove(late)
                if self._closed or self._pending_handshakes.has_room:
                    self._pending_handshakes.add(channel, now)
                    self._unfinished.add(channel)
                    break
                self._clock.sleep(self._changed, self._pending_handshakes.next_due())
        if late is not None:
            self._refuse("crowd", late, "it sent nothing, and other connections waited")
        return not self._closed

    def _remove(self, channel: Channel) -> None:
        with self._changed:
            self._pending_handshakes.remove(channel)
            self._unfinished.discard(channel)
            self._changed.notify_all()

    def _handshake(self, channel: Channel) -> None:
        try:
            self._complete(channel, time.monotonic() + self._seconds)
        except Refusal as refusal:
            self._refuse(refusal.reason.name.lower(), channel, refusal.message)
        except DeadlinePassed:
            self._refuse("slow", channel, f"its handshake took over {self._seconds:g} s")
        except BadMessage as error:
            self._refuse("introduction", channel, error.message)
        except GradwireError:  # it closed, as a liveness probe does, or we leave
            channel.close("the handshake failed")
        finally:
            self._remove(channel)

    def _refuse(self, kind: str, channel: Channel, why: str) -> None:
        channel.close(f"the handshake failed: {why}")
        if self._refusals.count(kind, _place(channel.remote)):
            _log.warning("%s refused %s: %s", self._me, channel.remote, why)


def _place(remote: str) -> str:
    """The remote host, without the port or process, which differs each time."""
    place = remote.partition(" (")[0]
    return place.rpartition(":")[0] if place.startswith("tcp:") else place
