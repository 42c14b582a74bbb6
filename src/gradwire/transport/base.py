"""The contract of every transport: whole frames, in order, between two ends.

A transport is a way to carry a `Frame`; how its bytes go is its own matter (a stream, a queue,
shared memory), as long as what is said here holds. This layer must not know workers, calls or what
a frame means. `gradwire.testing.conformance` checks this contract, on ours and on yours.

Deadlines are absolute, on the clock of `time.monotonic()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gradwire.errors import DeadlinePassed
from gradwire.options import Limits
from gradwire.wire.frame import Frame

HELD_AT_MOST = 1 << 24
"""Bytes a channel may hold for a peer that does not read; the frame that gets there still goes."""

CLOSED_BY_PEER = "connection closed by peer"
"""Also of one that was reset: a process that dies ends its connections in either way, by whether
bytes that it has not read are left in its kernel. The OSError is the `__cause__`.
"""


def closed_here(reason: str) -> str:
    """What PeerLost says after `close(reason)`."""
    return f"closed here: {reason}"


def unread_by_deadline(remote: str) -> DeadlinePassed:
    """What a send raises that could not begin in time."""
    return DeadlinePassed(
        f"{remote} had no room for a message before its deadline",
        hint="the peer reads too slowly or not at all, or a larger message was still on its way",
    )


def never() -> bool:
    """Nothing but what comes ends the wait."""
    return False


def unheard_by_deadline(remote: str) -> DeadlinePassed:
    """What a `hear` raises whose bytes did not come in time."""
    return DeadlinePassed(f"{remote} did not say who it is before the deadline")


class Reentered(Exception):
    """A thread called `maybe_recv` in the middle of its own, at a moment where that cannot be.

    Only so from a finalizer or a signal handler. Nothing was changed.
    """


class Channel(Protocol):
    """One end of a connection.

    Any thread may send; one thread at a time may recv, not always the same one. A finalizer or a
    signal handler may run in the middle of either, and do the same: what it sends goes before or
    after the whole frame that its thread is sending, and what it receives follows the frame that
    its thread has already taken.
    """

    limits: Limits
    """What the peer may promise in a prefix."""

    @property
    def peer_names(self) -> tuple[str, ...] | None:
        """The names that the peer has proven to have by a certificate; None where there is none."""
        return None

    @property
    def binding(self) -> bytes:
        """What both ends of this very connection know, and no other two; empty if there is none."""
        return b""

    @property
    def watches_itself(self) -> bool:
        """Whether this end would notice now, by itself, that the other one is gone or frozen.

        So it is in the middle of a frame that comes (`stall`), and always where both ends are in
        one process.
        """
        return False

    @property
    def taken(self) -> int:
        """How often something was taken from it, also if an interrupt came before it was returned.

        It grows by one with each frame. It may be one too many after an interrupt, never too few.
        """
        return 0

    @property
    def remote(self) -> str:
        """The address of the other end, as it is written in errors."""

    def say(self, words: bytes, deadline: float) -> None:
        """Send these bytes as they are; only before the first frame, while who is there is open."""

    def hear(self, length: int, deadline: float) -> bytes:
        """Exactly so many bytes as they came, and not one more is read; only before any frame.

        DeadlinePassed if they are not all there by then, however they trickle; PeerLost if the peer
        left before.
        """

    def send(self, frame: Frame, deadline: float) -> None:
        """Hand the frame over; when this returns, its buffers are yours again.

        DeadlinePassed means that not a byte of it has left, and the channel is as good as before. A
        frame that can go at once goes, however late it is. Once begun it is finished, unless
        the peer takes no byte for `stall` seconds, which ends the channel; what is left of it at
        the deadline goes when this has returned. After PeerLost nobody knows how much of the frame
        has arrived.
        """

    def lend_turn(self) -> bool:
        """Let others send though this thread is in the middle of it; False if it is not.

        For a finalizer or a signal handler that waits. It calls `take_turn_back` in the end.
        """
        return False

    def take_turn_back(self) -> None:
        """See `lend_turn`."""

    def recv(self) -> Frame:
        """Block for the next frame; its payload is one block, owned by whoever holds it.

        PeerLost once all that the peer sent before it left has been received, or at once after
        `close`; its message says which. BadMessage if the frame is over the limits, which ends
        the channel.
        """

    def maybe_recv(self, until: float, done: Callable[[], bool] = never) -> Frame | None:
        """Like `recv`, but None if no frame has begun to come by then; in the past: only look.

        None too soon after `done`, by which another thread says that we need not wait.
        """

    def close(self, reason: str = "close() was called") -> None:
        """End the connection, from any thread, any number of times; wakes a blocked send and recv.

        Frames already sent still reach a peer that reads; those not received here are dropped.
        """


class Listener(Protocol):
    """A place where peers connect."""

    @property
    def address(self) -> str:
        """Where peers connect to, with the port or name that was really taken."""

    def accept(self) -> Channel:
        """Block for the next connection; PeerLost once this listener was closed."""

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening, any number of times; wakes a blocked accept."""


class Transport(Protocol):
    """One way to reach a peer, chosen by the scheme of its address."""

    def listen(self, address: str) -> Listener:
        """Take the address; UsageError if it cannot be had."""

    def connect(self, address: str, deadline: float, name: str | None = None) -> Channel:
        """A channel to whoever listens there; `name` is the worker that should.

        PeerLost if nobody does, or if it proves to be another worker, where the transport can tell.
        DeadlinePassed if nobody has answered by then.
        """
