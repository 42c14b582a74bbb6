"""A TLS connection with a socket interface, for one reader and one writer at the same time.

Not `ssl.SSLSocket`: it lets two threads use one OpenSSL object, which OpenSSL forbids, or blocks
one of them behind the other. Here OpenSSL works in memory only, under a lock that is held while it
computes and never during a wait for the network.

Bytes read from the kernel may be buffered here, where `poll` cannot see them. So a read looks here
first, and raises BlockingIOError only if neither this buffer nor the kernel has a byte.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any, Final, final

from gradwire.transport.sockets.stream import INTERRUPTED, stalled
from gradwire.wire.message import Buffer

_READ: Final = 1 << 17
_CHUNK: Final = 1 << 16
_UNASKED_AT_MOST: Final = 1 << 16
_AT_ONCE: Final = int(socket.MSG_DONTWAIT)
_PATIENTLY: Final = int(socket.MSG_NOSIGNAL)


@final
class TlsSession:
    """The OpenSSL state of a connection, with memory buffers in place of a socket."""

    def __init__(self, context: ssl.SSLContext, *, accepts: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=accepts)

    def do_handshake(self) -> bool:
        """Continue the handshake with the received bytes; returns whether it is complete."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True


@final
class TlsStream:
    """A connected socket with its TLS session after the handshake; owns both."""

    def __init__(self, sock: socket.socket, session: TlsSession, stall: float) -> None:
        self._sock, self._stall = sock, stall
        self._tls, self._incoming, self._outgoing = session.tls, session.incoming, session.outgoing
        self._read: Any = session.tls.read  # given a buffer, it returns a count
        self._computing = threading.RLock()  # reentrant, as a finalizer may send
        self._is_dry = False
        self._broken: str | None = None
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)
        self.fileno, self.setblocking = sock.fileno, sock.setblocking
        self.setsockopt: Any = sock.setsockopt
        self.shutdown, self.close = sock.shutdown, sock.close

    # --- one reader at a time ---

    def recv(self, length: int, flags: int = 0, /) -> bytes:
        """See `socket.recv`."""
        block = memoryview(bytearray(length))
        return block[: self.recv_into(block, 0, flags)].tobytes()

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """Read what is buffered, or what comes next; see `socket.recv_into`.

        hot: benchmarks of round trips and of bandwidth
        """
        while True:
            if self._is_dry:
                # Set again only if nothing came: an interrupt may come after bytes were fed.
                self._is_dry = False
                # From the kernel to OpenSSL in one step, so that a Ctrl-C loses no byte.
                received = map(self._sock.recv, (_READ,), (flags & _AT_ONCE,))
                try:
                    if not next(map(self._incoming.write, received)):
                        return 0
                except BlockingIOError:
                    self._is_dry = True
                    raise
            count = self._decrypted(buffer)
            if count is not None:
                return count

    def _decrypted(self, target: memoryview) -> int | None:
        """Decrypt the buffered records into `target`; None if there are none, 0 at the end."""
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
            if at_stake:  # some bytes may be lost
                self._break(INTERRUPTED)
            raise
        return count

    def _fill(self, target: memoryview) -> int | None:
        """Decrypt, with the lock held. Bytes before an error are still returned."""
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
            reason = self._break(f"tls: {words_of(error)}")
            if not filled:
                raise OSError(errno.EPROTO, reason) from error
        return filled or None

    # --- one writer at a time ---

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        """See `socket.send`."""
        return self._encrypt(memoryview(data)[:_CHUNK], flags)

    def sendmsg(self, buffers: Iterable[Buffer], beside: object = (), flags: int = 0, /) -> int:
        """See `socket.sendmsg`; small buffers are joined into one chunk first."""
        parts, length = [], 0
        for part in buffers:
            view = memoryview(part)[: _CHUNK - length]
            parts.append(view)
            length += len(view)
            if length == _CHUNK:
                break
        return self._encrypt(parts[0] if len(parts) == 1 else b"".join(parts), flags)

    def _encrypt(self, chunk: Buffer, flags: int) -> int:
        """Encrypt and send a chunk. Once encrypted it must be sent, or the connection ends."""
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
                reason = self._break(stalled(self._stall))
                raise TimeoutError(errno.ETIMEDOUT, reason) from None
        return count

    def _check(self) -> None:
        if self._broken is not None:
            raise OSError(errno.EPROTO, self._broken)

    def _break(self, reason: str) -> str:
        self._broken = self._broken or reason
        return self._broken


def words_of(error: ssl.SSLError) -> str:
    """The reason of an OpenSSL error, without its source location."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    reason = error.reason or "connection ended"
    for prefix in ("SSLV3_", "TLSV1_", "TLSV13_"):
        reason = reason.removeprefix(prefix)
    return reason.replace("_", " ").lower()
