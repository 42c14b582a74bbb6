"""Where workers connect over TLS: one thread shakes hands with all who come, at the same time.

A stranger costs a socket and some memory until it has proved who it is, for a few seconds at most;
it never keeps anyone else waiting. Those who have proved it queue up for `accept`.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, final

from gradwire import threads
from gradwire.errors import PeerLost
from gradwire.threads import call_after_fork
from gradwire.transport.base import closed_here
from gradwire.transport.sockets.channel import SocketChannel
from gradwire.transport.sockets.stream import reason_of
from gradwire.transport.tls.identity import names_of
from gradwire.transport.tls.stream import Session, words_of

_log = logging.getLogger("gradwire")

PATIENCE_SECONDS: Final = 5.0
MOST_STRANGERS: Final = 256
_MOST_READY: Final = 1024
_MOST_KNOWN: Final = 1024
_HEARD_AT_MOST: Final = 1 << 16
_READ: Final = 1 << 14
_JOIN_SECONDS: Final = 5.0
_LONGEST_WAIT: Final = 3600.0
_BREATH_SECONDS: Final = 0.1
_AT_ONCE: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_HANDSHAKE: Final = 0x16
_WELCOME: Final = b"w"


class _Refused(Exception):
    """Why somebody is not let in."""


@final
class _Guest:
    """Somebody whose handshake is not over."""

    __slots__ = ("heard", "limit", "session", "sock", "who")

    def __init__(self, sock: socket.socket, session: Session, limit: float) -> None:
        self.sock, self.session, self.limit = sock, session, limit
        self.heard = 0
        self.who = str(sock.getpeername()[0])
        sock.setblocking(False)

    def goes_on(self) -> bool:
        """Hear what came and answer; whether the handshake is over, or _Refused."""
        heard = self.sock.recv(_READ)
        if not heard:
            raise _Refused("left during the handshake")
        if not self.heard and heard[0] != _HANDSHAKE:
            raise _Refused("does not speak TLS")
        self.heard += len(heard)
        if self.heard > _HEARD_AT_MOST:
            raise _Refused("said too much during the handshake")
        self.session.incoming.write(heard)
        try:
            is_over = self.session.shake_hands()
            if is_over and not names_of(self.session):
                raise _Refused("has a certificate that names no worker")
            if is_over:
                self.session.tls.write(_WELCOME)
        except ssl.SSLError as error:
            raise _Refused(words_of(error)) from error
        finally:
            self._answer()
        return is_over

    def _answer(self) -> None:
        """It is less than any socket holds, so who does not take it does not read."""
        said = self.session.outgoing.read()
        if said and self.sock.send(said, _AT_ONCE) != len(said):
            raise _Refused("does not read during the handshake")


@final
class TlsAcceptor:
    """Decides who comes in, on one thread. Owns the listening socket.

    `wrap` makes a channel of one who may.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: Callable[[], Session],
        wrap: Callable[[socket.socket, Session], SocketChannel],
        patience: float,
        pending_handshakes: int,
        refused: Callable[[str, str], None] | None = None,
    ) -> None:
        self._sock, self._session, self._wrap = sock, session, wrap
        self._patience, self._pending_handshakes = patience, pending_handshakes
        self._tell = refused or self._log_once
        self._guests: dict[_Guest, None] = {}
        self._selector = selectors.DefaultSelector()
        self._is_over = threading.Event()
        self._logged: set[tuple[str, str]] = set()
        self.refused: Counter[str] = Counter()
        """How many were not let in, by reason."""
        sock.setblocking(False)
        call_after_fork(self)

    def forked(self) -> None:
        """See transport/forking.py.

        The selector is not asked to forget them: it is the parent's too.
        """
        self._is_over.set()
        for sock in (self._sock, *(guest.sock for guest in tuple(self._guests))):
            sock.close()

    def work(self, admit: Callable[[SocketChannel], bool]) -> None:
        """Until `stop`. `admit` takes who comes in, or says that there is no room."""
        self._selector.register(self._sock, selectors.EVENT_READ)
        while not self._is_over.is_set():
            for key, _ in self._selector.select(self._until_next_limit()):
                if key.data is None:
                    self._greet()
                else:
                    self._hear(key.data, admit)
            self._send_away_late()
        for guest in tuple(self._guests):
            self._send_away(guest)
        self._selector.close()
        self._sock.close()

    def stop(self) -> None:
        """From any thread; nobody can connect any more."""
        self._is_over.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _greet(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Without free handles it stays in the queue: others may be closed meanwhile.
            if error.errno != errno.ECONNABORTED:
                self._is_over.wait(_BREATH_SECONDS)
            return
        try:
            guest = _Guest(sock, self._session(), time.monotonic() + self._patience)
        except OSError:
            sock.close()
            return
        if len(self._guests) >= self._pending_handshakes:
            self._refuse(next(iter(self._guests)), "was the oldest of too many strangers")
        self._guests[guest] = None
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest, admit: Callable[[SocketChannel], bool]) -> None:
        if guest not in self._guests:
            return  # sent away while this was due
        try:
            if not guest.goes_on():
                return
            self._forget(guest)
            channel = self._wrap(guest.sock, guest.session)
        except BlockingIOError:
            return
        except _Refused as refusal:
            self._refuse(guest, str(refusal))
        except OSError as error:
            self._refuse(guest, reason_of(error))
        except Exception as error:  # a mistake of ours: others still come in
            _log.exception("shaking hands with %s failed", guest.who)
            self._refuse(guest, type(error).__name__)
        else:
            if not admit(channel):
                channel.close("too many connections wait to be accepted")

    def _until_next_limit(self) -> float:
        if not self._guests:
            return _LONGEST_WAIT
        return max(0.0, next(iter(self._guests)).limit - time.monotonic())

    def _send_away_late(self) -> None:
        now = time.monotonic()
        for guest in tuple(self._guests):
            if guest.limit > now:
                return
            self._refuse(guest, "took too long for the handshake")

    def _refuse(self, guest: _Guest, why: str) -> None:
        self.refused[why] += 1
        self._send_away(guest)
        self._tell(why, f"tls://{guest.who}")

    def _log_once(self, why: str, remote: str) -> None:
        if (remote, why) not in self._logged and len(self._logged) < _MOST_KNOWN:
            self._logged.add((remote, why))
            _log.warning("refused %s: %s", remote, why)

    def _send_away(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.sock.close()

    def _forget(self, guest: _Guest) -> None:
        if self._guests.pop(guest, guest) is None:
            self._selector.unregister(guest.sock)


@final
class TlsListener:
    """A place where workers connect; see `Listener`."""

    def __init__(self, acceptor: TlsAcceptor, address: str, worker: str) -> None:
        self.address = address
        self._acceptor = acceptor
        self._ready: deque[SocketChannel] = deque()
        self._changed = threading.Condition()
        self._story: str | None = None
        self._thread = threads.thread(
            f"gradwire {worker} tls", partial(self._acceptor.work, self._admit)
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<TlsListener on {self.address}: {self._story or 'open'}>"

    @property
    def refused(self) -> Counter[str]:
        """How many were not let in, by reason."""
        return Counter(self._acceptor.refused)

    def accept(self) -> SocketChannel:
        """Block for the next that has proved who it is; see `Listener.accept`."""
        with self._changed:
            while not self._ready and self._story is None:
                self._changed.wait(_LONGEST_WAIT)
            if self._story is not None:
                raise PeerLost(f"{self.address} was {self._story}")
            return self._ready.popleft()

    def close(self, reason: str = "close() was called") -> None:
        """Stop listening; see `Listener.close`."""
        with self._changed:
            if self._story is None:
                self._story = closed_here(reason)
            unwanted, self._ready = self._ready, deque()
            self._changed.notify_all()
        self._acceptor.stop()
        for channel in unwanted:
            channel.close(reason)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _admit(self, channel: SocketChannel) -> bool:
        with self._changed:
            has_room = self._story is None and len(self._ready) < _MOST_READY
            if has_room:
                self._ready.append(channel)
                self._changed.notify()
        return has_room
