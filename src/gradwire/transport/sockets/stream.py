"""What a channel asks of the connected stream below it: a part of what a socket can do.

The stream blocks, with kernel timeouts; MSG_DONTWAIT asks for one step that does not. Where nothing
can be read or written in time it raises BlockingIOError.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NoReturn, Protocol, TypeAlias, final

from gradwire.errors import PeerLost
from gradwire.threads import FORKED, call_after_fork, renew_after_fork
from gradwire.transport.base import CLOSED_BY_PEER, closed_here
from gradwire.wire.frame import Buffer

Beside: TypeAlias = Iterable[tuple[int, int, Buffer]]

Use: TypeAlias = "threading.Lock | threading.RLock"
INTERRUPTED: Final = closed_here("interrupted in the middle of a message")


class Stream(Protocol):
    """A connected socket, or what stands for one."""

    def fileno(self) -> int:
        """What `poll` waits on, once a read or write has raised BlockingIOError."""

    def recv(self, length: int, flags: int = 0, /) -> bytes:
        """At most so many bytes; none at the end."""

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """Bytes that were read; 0 at the end."""

    def recvmsg_into(
        self, buffers: Iterable[memoryview], room: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """The same, with what comes beside the bytes; for unix sockets."""

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        """Bytes that were taken."""

    def sendmsg(self, buffers: Iterable[Buffer], beside: Beside = (), flags: int = 0, /) -> int:
        """Bytes that were taken, of all the buffers together."""

    def setblocking(self, flag: bool, /) -> None:
        """True, from the channel."""

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        """The timeouts, from the channel."""

    def shutdown(self, how: int, /) -> None:
        """Wake everyone who is blocked here."""

    def close(self) -> None:
        """Give the descriptor back."""


@final
class Guard:
    """Ends a socket at once, and closes its file descriptor when the last use of it is over.

    Closing a descriptor that another thread is blocked on does not wake it, and the number may be
    given to a new file while it is still in use. So `end` only shuts the connection down, which
    wakes everyone, and whoever leaves last closes: each use holds one of the locks, and calls
    `settle` after its release if `story` is set by then. `also_close` goes with the socket, and may
    be called more than once.
    """

    __slots__ = ("__weakref__", "_also_close", "_ending", "_sock", "_uses", "story")

    def __init__(
        self,
        sock: Stream,
        *uses: Use,
        also_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.story: str | None = None
        self._sock = sock
        self._uses = uses
        self._also_close = also_close
        # Reentrant, as a signal handler may close what its own thread is closing.
        self._ending = threading.RLock()
        call_after_fork(self)

    def end(self, story: str) -> bool:
        """Whether this was the first time; only then the story counts."""
        with self._ending:
            first = self.story is None
            if first:
                self.story = story
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self.settle()
        return first

    def forked(self) -> None:
        """See transport/forking.py: without `shutdown`, which would end the parent's connection."""
        self.story = self.story or closed_here(FORKED)
        renew_after_fork(self._ending)
        self._sock.close()
        self._also_close()

    def settle(self) -> None:
        """Close the descriptor unless it is in use."""
        with self._ending:
            held = [use for use in self._uses if not _is_mine(use) and use.acquire(blocking=False)]
            if len(held) == len(self._uses):
                self._sock.close()
                self._also_close()
            for use in held:
                use.release()

    def lose(self, story: str, cause: Exception | None = None) -> NoReturn:
        """End it, and say so."""
        self.end(story)
        # Not `story`: it may be us who closed, and the socket only looks as if the peer had.
        raise PeerLost(self.story or story) from cause


def _is_mine(use: Use) -> bool:
    """Whether this thread is in the middle of a use, which an RLock would let it enter again."""
    is_owned: Callable[[], bool] = getattr(use, "_is_owned", _never)
    return is_owned()


def _never() -> bool:
    return False


def stalled(seconds: float) -> str:
    """The story of a connection on which nothing moved for so long."""
    return closed_here(f"no byte moved for {seconds:g} s in the middle of a message")


def reason_of(error: OSError) -> str:
    """What an operating system error says, in the words of our messages."""
    return (error.strerror or str(error)).lower()


def story_of(error: OSError) -> str:
    """The story of a connection that ended with an error of the operating system."""
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return CLOSED_BY_PEER
    return reason_of(error)
