"""Accepts connections, and runs the handshake of each: the driver of handshake_state.py.

The handshake uses `send_raw` and `recv_raw` only: no frame of a connection is decoded before both
sides have given their proof. Then each side sends a Hello. Each handshake has a thread of its own,
and a few seconds. Their number is bounded, so that many unauthenticated connections do not disturb
the peers that are already connected.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from gradwire.agent.links import handshake_state as state
from gradwire.agent.messages import Hello
from gradwire.agent.peers.directory import Directory, Member
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret
from gradwire.agent.requests.timer import Clock
from gradwire.errors import BadMessage, DeadlinePassed, GradwireError, PeerLost
from gradwire.ids import WorkerId
from gradwire.options import Options
from gradwire.threads import IRREPLACEABLE, Spawn
from gradwire.transport.base import Channel, Listener
from gradwire.transport.near import ManyListeners

_PURPOSE = "handshake"
_FAIR_SECONDS = 1.0  # the least that each handshake gets, however many connections wait behind it
_log = logging.getLogger("gradwire")


def prove(channel: Channel, secret: Secret, job: str, me: str, peer: str, deadline: float) -> None:
    """As the dialler: prove who we are, and check that `peer` listens."""
    key, nonce = secret.key(_PURPOSE), secrets.token_bytes(state.NONCE_BYTES)
    dialling = state.Dialling(key, job, me, peer, nonce=nonce, binding=channel.binding)
    channel.send_raw(dialling.opening(channel.peer_names), deadline)
    channel.send_raw(dialling.proof(_heard(channel, deadline)), deadline)
    dialling.check(_heard(channel, deadline))


def examine(channel: Channel, secret: Secret, job: str, me: str, deadline: float) -> str:
    """As the listener: check the dialler's proof; returns its name."""
    key, nonce = secret.key(_PURPOSE), secrets.token_bytes(state.NONCE_BYTES)
    listening = state.Listening(key, job, me, nonce=nonce, binding=channel.binding)
    try:
        opening = _heard(channel, deadline)
        channel.send_raw(listening.challenge(opening, channel.peer_names), deadline)
        channel.send_raw(listening.proof(_heard(channel, deadline)), deadline)
    except state.Refusal as refusal:
        if refusal.reason is not state.Reason.STRANGER:  # which would not understand why
            with suppress(GradwireError):
                channel.send_raw(state.refused(refusal.reason), deadline)
        raise
    return listening.peer


def _heard(channel: Channel, deadline: float) -> bytes:
    head = channel.recv_raw(state.HEAD_BYTES, deadline)
    return head + channel.recv_raw(state.body_length(head), deadline)


def check_hello(
    theirs: Hello, name: str, directory: Directory, *, dialled: WorkerId | None
) -> Member:
    """The member that sent this Hello. BadMessage if it is not the worker that was dialled."""
    if dialled is not None and theirs.worker != dialled:
        raise BadMessage(f"{name} says that it is not number {dialled}, but {theirs.worker}")
    if dialled is not None and theirs.incarnation != directory.incarnation(dialled):
        raise BadMessage(f"{name} is another incarnation than the one that was dialled")
    return Member(theirs.worker, name, theirs.address, theirs.incarnation, theirs.note)


@final
class Acceptor:
    """The listener of one worker, and the handshakes of the connections it accepted."""

    def __init__(
        self, me: str, listener: Listener, options: Options, clock: Clock, refusals: Refusals
    ) -> None:
        self._me, self._listener, self._clock, self._refusals = me, listener, clock, refusals
        self._seconds = options.timeouts.handshake
        most, fair_seconds = options.limits.pending_handshakes, min(_FAIR_SECONDS, self._seconds)
        self._pending_handshakes = state.PendingHandshakes[Channel](most, fair_seconds)
        self._unfinished: set[Channel] = set()
        """channels that are not in use yet, those with a proof but without a Hello included"""
        self._changed = threading.Condition()
        self._closed = False

    def open(self, spawn: Spawn, handshake: Callable[[Channel, float], None]) -> None:
        """Begin to accept. `handshake(channel, deadline)` uses a channel, or raises why not."""
        self._spawn, self._complete = spawn, handshake
        # A finalizer on these threads may call through a connection that waits for them.
        parts = (
            listener.parts if isinstance(listener := self._listener, ManyListeners) else (listener,)
        )
        for part in parts:
            self._spawn("accept", partial(self._accept, part), IRREPLACEABLE)

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
            if not self._pending_handshakes.remove(channel):
                raise PeerLost("it was closed meanwhile to make room for others")
            self._changed.notify_all()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                channel = listener.accept()
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
            self._complete(channel, time.monotonic() + self._seconds)  # channels use this clock
        except state.Refusal as refusal:
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
        # The remote host is counted, without the port or process, which differs each time.
        place = channel.remote.partition(" (")[0]
        host = place.rpartition(":")[0] if place.startswith("tcp:") else place
        if self._refusals.count(kind, host):
            _log.warning("%s refused %s: %s", self._me, channel.remote, why)
