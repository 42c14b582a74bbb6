"""What all sockets share: how they are waited for and closed, and what their errors mean.

Reads and writes block, with kernel timeouts; with MSG_DONTWAIT they do not. If nothing can be read
or written in time, they raise BlockingIOError.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, final

from gradwire.errors import DeadlinePassed, PeerLost
from gradwire.threads import FORKED, call_after_fork, renew_after_fork
from gradwire.transport.base import CLOSED_BY_PEER, closed_here
from gradwire.wire.message import Buffer

if TYPE_CHECKING:
    from gradwire.transport.tls.stream import TlsStream

SocketLike: TypeAlias = "socket.socket | TlsStream"
Ancillary: TypeAlias = Iterable[tuple[int, int, Buffer]]
Use: TypeAlias = "threading.Lock | threading.RLock"
_LONGEST_WAIT: Final = 86400.0
INTERRUPTED: Final = closed_here("interrupted in the middle of a message")


@final
class SocketCloser:
    """Shuts a socket down at once, and closes its descriptor when no thread uses it any more.

    Closing a descriptor does not wake a thread that is blocked on it, and the kernel may give its
    number to a new file while that thread still uses it. So `end` only shuts the connection down,
    which wakes all threads, and the last one closes it: a thread holds one of the locks while it
    uses the socket, and calls `close_if_unused` after the release if `close_reason` is set.
    `also_close` is called with the close of the socket, possibly more than once.
    """

    __slots__ = ("__weakref__", "_also_close", "_ending", "_sock", "_uses", "close_reason")

    def __init__(
        self,
        sock: SocketLike,
        *uses: Use,
        also_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.close_reason: str | None = None
        self._sock = sock
        self._uses = uses
        self._also_close = also_close
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
            # This thread could acquire an RLock again that it holds.
            free = [use for use in self._uses if not getattr(use, "_is_owned", bool)()]
            held = [use for use in free if use.acquire(blocking=False)]
            if len(held) == len(self._uses):
                self._sock.close()
                self._also_close()
            for use in held:
                use.release()

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
def connecting_to(address: str, hint: str | None = None) -> Iterator[None]:
    """Translate the OSErrors of a connect into DeadlinePassed and PeerLost."""
    try:
        yield
    except TimeoutError as error:
        raise DeadlinePassed(f"{address} did not answer before the deadline") from error
    except OSError as error:
        raise PeerLost(f"cannot reach {address}: {reason_of(error)}", hint=hint) from error


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
