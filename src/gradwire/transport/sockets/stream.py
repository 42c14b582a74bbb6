"""What all sockets share: how they listen, are waited for and closed; what their errors mean.

Reads and writes block, with kernel timeouts; with MSG_DONTWAIT they do not. If nothing can be read
or written in time, they raise BlockingIOError.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast, final

from gradwire.errors import DeadlinePassed, PeerLost
from gradwire.threads import FORKED, call_after_fork, renew_after_fork
from gradwire.transport.base import CLOSED_BY_PEER, Channel, closed_here

if TYPE_CHECKING:
    from gradwire.transport.tls_session import TlsStream

SocketLike: TypeAlias = "socket.socket | TlsStream"
_LONGEST_WAIT: Final = 86400.0
_BACKLOG: Final = 1024
_OUT_OF_HANDLES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BLOCKED: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM}
SPIN_SECONDS: Final = 1e-3
_DESCHEDULED_SECONDS: Final = 500e-6
_REST_SECONDS: Final = 0.02
_LONGEST_REST_SECONDS: Final = 0.1
_VAIN_SPINS: Final = 3
INTERRUPTED: Final = closed_here("interrupted in the middle of a message")


@final
class SocketCloser:
    """Shuts a socket down at once, and closes its descriptor when no thread uses it any more.

    Closing a descriptor does not wake a thread that is blocked on it, and the kernel may give its
    number to a new file while that thread still uses it. So `end` only shuts the connection down,
    which wakes all threads, and the last one closes it: a thread holds `sending` or `receiving`
    while it uses the socket, and after the release calls `close_if_unused` if `close_reason` is
    set. `also_close` is called with the close of the socket, possibly more than once.
    """

    def __init__(self, sock: SocketLike, also_close: Callable[[], None] = lambda: None) -> None:
        self.close_reason: str | None = None
        self.sending = threading.Lock()
        self.receiving = threading.RLock()  # see Note [Reading inside a read] in channel.py
        self._sock, self._also_close = sock, also_close
        # Reentrant, as a signal handler may close what its own thread is closing.
        self._ending = threading.RLock()
        call_after_fork(self)

    def end(self, reason: str) -> bool:
        """End the connection; returns whether this was the first call, whose reason is kept."""
        with self._ending:
            first = self.close_reason is None
            if first:
                self.close_reason = reason
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self.close_if_unused()
        return first

    def forked(self) -> None:
        """Close the copy of a forked process; `shutdown` would end the parent's connection."""
        self.close_reason = self.close_reason or closed_here(FORKED)
        renew_after_fork(self._ending)
        self._sock.close()
        self._also_close()

    def close_if_unused(self) -> None:
        """Close the descriptor unless a thread uses it, which then calls this itself."""
        with self._ending:
            # This thread could acquire the RLock again that it holds.
            is_inside: bool = cast(Any, self.receiving)._is_owned()
            if not is_inside and self.receiving.acquire(blocking=False):
                if self.sending.acquire(blocking=False):
                    self._sock.close()
                    self._also_close()
                    self.sending.release()
                self.receiving.release()

    def fail(self, reason: str, cause: Exception | None = None) -> NoReturn:
        """End the connection, and raise PeerLost."""
        self.end(reason)
        # Not `reason`: after a `close` here, the socket only looks as if the peer had closed.
        raise PeerLost(self.close_reason or reason) from cause


def wait_until_ready(sock: SocketLike, event: int, seconds: float) -> bool:
    """Wait for POLLIN or POLLOUT; False if neither it nor an error came in time."""
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(1 + int(1000 * min(seconds, _LONGEST_WAIT))))


def seconds_until(deadline: float) -> float:
    """For the timeout of a socket; TimeoutError if no time is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, _LONGEST_WAIT)


@contextmanager
def connecting_to(
    address: str, hint: str | None = None, blocked_hint: str | None = None
) -> Iterator[None]:
    """Translate the OSErrors of a connect into DeadlinePassed and PeerLost.

    `blocked_hint` is for those that a firewall causes: no answer at all, or that of a router.
    """
    try:
        yield
    except TimeoutError as error:
        raise DeadlinePassed(
            f"{address} did not answer before the deadline", hint=blocked_hint
        ) from error
    except OSError as error:
        is_blocked = error.errno in _BLOCKED
        raise PeerLost(
            f"cannot reach {address}: {reason_of(error)}", hint=blocked_hint if is_blocked else hint
        ) from error


def stalled(seconds: float) -> str:
    """The close reason of a connection on which nothing moved for `seconds`."""
    return closed_here(f"no byte moved for {seconds:g} s in the middle of a message")


def reason_of(error: OSError) -> str:
    """The text of an OSError, in lower case."""
    return (error.strerror or str(error)).lower()


def close_reason_of(error: OSError) -> str:
    """The close reason of a connection that ended with an OSError."""
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return CLOSED_BY_PEER
    return reason_of(error)


def listening_socket(family: int, place: str | tuple[object, ...]) -> socket.socket:
    """A socket that listens at a place of its family; OSError if that is not possible."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        if isinstance(place, str):
            # No peer can connect before `listen`, so the mode is never too wide.
            os.chmod(place, 0o600)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


@final
class SocketListener:
    """A listening socket, which it owns.

    `wrap` makes a channel from an accepted socket, or None to refuse it; `on_close` runs once.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        wrap: Callable[[socket.socket], Channel | None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._sock, self._wrap, self._on_close = sock, wrap, on_close
        self._closer = SocketCloser(sock)
        self._closed = threading.Event()
        sock.setblocking(True)

    def __repr__(self) -> str:
        return f"<SocketListener on {self.address}: {self._closer.close_reason or 'open'}>"

    def accept(self) -> Channel:
        """See `Listener.accept`."""
        with self._closer.receiving:
            channel = None
            while channel is None and self._closer.close_reason is None:
                channel = self._maybe_accept()
        if self._closer.close_reason is not None:
            self._closer.close_if_unused()
        if channel is None:
            raise PeerLost(f"{self.address} was {self._closer.close_reason}")
        return channel

    def close(self, reason: str = "close() was called") -> None:
        """See `Listener.close`."""
        if self._closer.end(closed_here(reason)):
            self._closed.set()
            self._on_close()

    def _maybe_accept(self) -> Channel | None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            # The peer may have left again. Without free descriptors the connection stays in the
            # backlog until others are closed.
            if error.errno in _OUT_OF_HANDLES:
                self._closed.wait(0.1)
            return None
        try:
            return self._wrap(sock)
        except OSError:
            sock.close()
            return None


@final
class Spin:
    """How long a reader polls the socket before it blocks.

    Waking a blocked thread costs more than a short call, so a reader first polls for a moment, if
    that succeeded lately. One or two spins in vain are no reason to stop: the machine may have been
    slow for a moment, and a worker that blocks delays its next answers, so that its peer spins in
    vain, too. On a busy machine the peer needs the core, and the reader is descheduled between two
    polls: it then stops at once, and does not spin again for a while.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._last = 0.0
        self._rest = _REST_SECONDS
        self._rests_until = 0.0
        self._in_vain = 0

    def begin(self) -> bool:
        """Start a spin; returns whether to spin at all."""
        now = self._began = self._last = self._now()
        return now >= self._rests_until

    def should_continue(self) -> bool:
        """Whether to poll once more. If not, spinning may be disabled, with exponential backoff."""
        now = self._now()
        was_descheduled = now - self._last > _DESCHEDULED_SECONDS
        self._last = now
        if not was_descheduled and now - self._began <= SPIN_SECONDS:
            return True
        self._in_vain += 1
        if was_descheduled or self._in_vain >= _VAIN_SPINS:
            self._rests_until = now + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST_SECONDS)
        return False

    def found(self) -> None:
        """The spin succeeded: bytes arrived."""
        self._rest, self._in_vain = _REST_SECONDS, 0
