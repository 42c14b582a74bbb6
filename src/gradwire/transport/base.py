"""The contract of every transport: whole frames, in order, between two ends.

This layer must not know workers, calls or what a frame means. The checks in
tests/transport/conformance.py test any transport against this contract. Deadlines are absolute, on
the clock of `time.monotonic()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gradwire.errors import DeadlinePassed
from gradwire.options import Limits
from gradwire.wire.message import Frame

Carried = dict[str, tuple[int, int]]
"""The bytes that a channel has sent and received, by their way: its address scheme, or `shm`."""

MAX_BUFFERED_BYTES = 1 << 24
"""What a channel may buffer for a peer that does not read; it accepts the frame that reaches it."""

# For a reset connection too: when a process dies, the kernel resets a connection with unread bytes
# and closes the others. The OSError is the `__cause__`.
CLOSED_BY_PEER = "connection closed by peer"


def closed_here(reason: str) -> str:
    """The message of PeerLost after `close(reason)`."""
    return f"closed here: {reason}"


def send_timed_out(remote: str) -> DeadlinePassed:
    """The error of a send that could not begin before its deadline."""
    return DeadlinePassed(
        f"{remote} did not accept a message before its deadline",
        hint="the peer reads too slowly or not at all, or a larger message was still being sent",
    )


def never() -> bool:
    """The default `done` of `Channel.maybe_recv`: only a frame or the deadline ends the wait."""
    return False


def recv_raw_timed_out(remote: str) -> DeadlinePassed:
    """The error of a `recv_raw` whose bytes did not arrive in time."""
    return DeadlinePassed(f"{remote} did not say who it is before the deadline")


class Reentered(Exception):
    """A finalizer or signal handler called `maybe_recv` inside one that cannot be resumed."""


class Channel(Protocol):
    """One end of a connection.

    Any thread may send; one thread at a time may receive, not always the same one. A finalizer or a
    signal handler may interrupt either and send or receive itself: its frame goes before or after
    the whole frame that its thread is sending, and it receives the frame after the one that its
    thread has already taken.
    """

    remote: str
    """The address of the other end, for error messages."""
    limits: Limits
    """The largest head and payload that the peer may announce in a prefix."""
    peer_names: tuple[str, ...] | None
    """The worker names in the peer's verified certificate; None without certificates."""
    binding: bytes
    """The channel binding: bytes that only the two ends of this connection know, or empty."""
    needs_heartbeat: bool
    """Whether only heartbeats tell that the peer is frozen or gone: not while a frame is being
    received (`stall` applies), nor inside one process.
    """

    @property
    def frames_received(self) -> int:
        """The number of frames received; after an interrupt maybe one too many, never too few."""

    @property
    def shared_bytes(self) -> int:
        """The size of the shared memory that this end has made for the other."""

    def carried(self) -> Carried:
        """The bytes sent and received until now, the handshake included, before any encryption."""

    def send_raw(self, data: bytes, deadline: float) -> None:
        """Send raw bytes without a frame; only during the handshake, before the first frame."""

    def recv_raw(self, length: int, deadline: float) -> bytes:
        """Receive exactly `length` raw bytes, and read no more; only during the handshake.

        DeadlinePassed if some are missing at the deadline; PeerLost if the peer closed before.
        """

    def send(self, frame: Frame, deadline: float) -> None:
        """Send the frame; when this returns, the caller may change its buffers.

        DeadlinePassed means that no byte of it was sent, and the channel is still usable. A frame
        that can be sent at once is sent, even after its deadline. A frame once begun is finished,
        after this returns if necessary, unless the peer accepts no byte for `stall` seconds,
        which ends the channel. After PeerLost it is unknown how much of the frame arrived.
        """

    def maybe_recv(self, until: float, done: Callable[[], bool] = never) -> Frame | None:
        """The next frame, with its payload in one block of memory; None if none begins by `until`.

        Also None soon after `done()` is true, which tells that the wait is no longer needed. Does
        not wait if `until` is past. PeerLost after the last frame that the peer sent, or at once
        after `close`; its message says which. BadMessage if the frame is over the limits, which
        ends the channel.
        """

    def close(self, reason: str = "close() was called") -> None:
        """End the connection and wake a blocked send and read; idempotent, from any thread.

        Frames already sent still reach a peer that reads; those not received here are dropped.
        """


class Listener(Protocol):
    """A listening endpoint."""

    address: str
    """The address to connect to, with the port or name that was chosen."""

    def accept(self) -> Channel:
        """Block for the next connection; PeerLost once this listener is closed."""

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening and wake a blocked accept; idempotent."""


class Transport(Protocol):
    """A factory of channels and listeners for one address scheme."""

    def listen(self, address: str) -> Listener:
        """Listen at the address; UsageError if that is not possible."""

    def connect(self, address: str, deadline: float, name: str | None = None) -> Channel:
        """Connect to the listener at the address; `name` is the worker expected there.

        PeerLost if there is no listener, or, where the transport can tell, if it is another worker.
        DeadlinePassed if there is no answer by the deadline.
        """
