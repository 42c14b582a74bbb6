"""A TLS connection that is used like a socket, by one reader and one writer at once.

Not `ssl.SSLSocket`: it lets two threads into one OpenSSL object, which OpenSSL forbids, or blocks
one of them behind the other. Here OpenSSL works in memory alone, under a lock that is held while it
computes and never while anyone waits for the network.

What has been read from the kernel may lie decrypted in here, where `poll` cannot see it. So a read
looks here first, and raises BlockingIOError only if neither this nor the kernel has a byte.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any, Final, NoReturn, final

from gradwire.transport.sockets.stream import INTERRUPTED, Beside, stalled
from gradwire.wire.frame import Buffer

_READ: Final = 1 << 17
_CHUNK: Final = 1 << 16
_UNASKED_AT_MOST: Final = 1 << 16
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
_PATIENTLY: Final = int(socket.MSG_NOSIGNAL)


@final
class Session:
    """OpenSSL's half of a connection: bytes in, bytes out, no socket."""

    __slots__ = ("incoming", "outgoing", "tls")

    def __init__(self, context: ssl.SSLContext, *, accepts: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=accepts)

    def shake_hands(self) -> bool:
        """Go on as far as what came allows; whether the handshake is over."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True


@final
class TlsStream:
    """A socket after its handshake, both of which it owns; see the top of this file."""

    def __init__(self, sock: socket.socket, session: Session, stall: float) -> None:
        self._sock, self._stall = sock, stall
        self._tls, self._incoming, self._outgoing = session.tls, session.incoming, session.outgoing
        self._read: Any = session.tls.read  # which returns a number when it is given a buffer
        self._computing = threading.RLock()  # a finalizer inside may send
        self._is_dry = False
        self._broken: str | None = None
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)
        self.fileno, self.setblocking = sock.fileno, sock.setblocking
        self.setsockopt: Any = sock.setsockopt
        self.shutdown, self.close = sock.shutdown, sock.close

    # --- one reader at a time ---

    def recv(self, length: int, flags: int = 0, /) -> bytes:
        """At most so many bytes, and what follows them stays; see `Stream.recv`."""
        block = memoryview(bytearray(length))
        return block[: self.recv_into(block, 0, flags)].tobytes()

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """What is there, or what comes first; see `Stream.recv_into`.

        hot: benchmarks of round trips and of bandwidth
        """
        while True:
            if self._is_dry:
                # Undone only once nothing came: an interrupt may follow what did.
                self._is_dry = False
                try:
                    if not self._feed(flags & _AT_ONCE):
                        return 0
                except BlockingIOError:
                    self._is_dry = True
                    raise
            count = self._decrypted(buffer)
            if count is not None:
                return count

    def recvmsg_into(
        self, buffers: Iterable[memoryview], room: int = 0, flags: int = 0, /
    ) -> NoReturn:
        """Nothing comes beside the bytes here."""
        raise AssertionError("no descriptor travels over TLS")

    def _feed(self, flags: int) -> bool:
        """Bring over what the kernel has; False at the end.

        In one step for the interpreter, so that no byte is lost to a Ctrl-C.
        """
        received = map(self._sock.recv, (_READ,), (flags,))
        return next(map(self._incoming.write, received)) > 0

    def _decrypted(self, target: memoryview) -> int | None:
        """As much as is here, a record or several; None if there is none, 0 at the end."""
        self._check()
        at_stake = 0
        try:
            with self._computing:
                at_stake = self._incoming.pending + self._tls.pending()
                count = self._fill(target)
                if self._outgoing.pending > _UNASKED_AT_MOST:
                    raise OSError(errno.EPROTO, self._break("tls: too many key updates"))
        except OSError:
            raise
        except BaseException:
            if at_stake:  # some of it may be lost
                self._break(INTERRUPTED)
            raise
        return count

    def _fill(self, target: memoryview) -> int | None:
        """With the lock held. What came before an error is still given out."""
        filled, wanted = 0, len(target)
        try:
            while filled < wanted:
                count: int = self._read(wanted - filled, target[filled:])
                if not count:
                    return filled
                filled += count
        except ssl.SSLWantReadError:
            self._is_dry = True
        except ssl.SSLError as error:
            story = self._break(f"tls: {words_of(error)}")
            if not filled:
                raise OSError(errno.EPROTO, story) from error
        return filled or None

    # --- one writer at a time ---

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        """See `Stream.send`."""
        return self._encrypt(memoryview(data)[:_CHUNK], flags)

    def sendmsg(self, buffers: Iterable[Buffer], beside: Beside = (), flags: int = 0, /) -> int:
        """See `Stream.sendmsg`; a chunk of many small parts is copied together first."""
        parts, length = [], 0
        for part in buffers:
            view = memoryview(part)[: _CHUNK - length]
            parts.append(view)
            length += len(view)
            if length == _CHUNK:
                break
        return self._encrypt(parts[0] if len(parts) == 1 else b"".join(parts), flags)

    def _encrypt(self, chunk: Buffer, flags: int) -> int:
        """Encrypted is begun: from there on it is sent, or the connection is over."""
        self._check()
        if flags & _AT_ONCE and not self._room.poll(0):
            raise BlockingIOError(errno.EAGAIN, "no room")
        try:
            with self._computing:
                count = self._tls.write(chunk)
                unsent = memoryview(self._outgoing.read())
        except ssl.SSLError as error:
            raise OSError(errno.EPROTO, self._break(f"tls: {words_of(error)}")) from error
        while unsent:
            try:
                unsent = unsent[self._sock.send(unsent, _PATIENTLY) :]
            except BlockingIOError:
                story = self._break(stalled(self._stall))
                raise TimeoutError(errno.ETIMEDOUT, story) from None
        return count

    # --- either ---

    def _check(self) -> None:
        if self._broken is not None:
            raise OSError(errno.EPROTO, self._broken)

    def _break(self, story: str) -> str:
        self._broken = self._broken or story
        return self._broken


def words_of(error: ssl.SSLError) -> str:
    """What OpenSSL says, without where in its source it says it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    reason = error.reason or "connection ended"
    for prefix in ("SSLV3_", "TLSV1_", "TLSV13_"):
        reason = reason.removeprefix(prefix)
    return reason.replace("_", " ").lower()
