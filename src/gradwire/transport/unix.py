"""Frames over a unix socket, between processes of one user on one host.

Large payloads go through shared memory (shared_memory.py) where both ends have it.

File permissions protect the socket: it has mode 0600, and without a given path it lies in a new
directory of mode 0700. Both ends also check (SO_PEERCRED) that the other runs as the same user:
the mode may have been widened by hand, and in a directory that others can write to, another
user may have replaced the socket.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from gradwire.errors import DeadlinePassed, NotTrusted, PeerLost, UsageError
from gradwire.options import Limits
from gradwire.transport.address import parse_address
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.memfd import can_share
from gradwire.transport.shared_memory import SHARED_AT_MOST, SHARED_FROM, SharedMemory
from gradwire.transport.sockets.channel import ChannelFactory, SocketChannel, as_timeval
from gradwire.transport.sockets.listener import SocketListener
from gradwire.transport.sockets.stream import reason_of

_BACKLOG = 1024
_LONGEST_PATH = 107
_OWN = re.compile(r"gradwire-(\d+)-")
_SOCKET = "socket"
_LEFT_SECONDS = 60.0
"""A younger directory may be about to get its socket."""
_CREDENTIALS = struct.Struct("iII")


@final
class UnixTransport:
    """The transport for unix:///path, or unix:// for a generated path.

    Each channel makes at most `shared_bytes` of shared memory, for payloads of `shared_from` bytes
    or more; with 0 all goes through the socket. `refused(kind, address)` is called for a peer of
    another user.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        stall: float | None = None,
        pool: BlockPool | None = None,
        shared_bytes: int = SHARED_AT_MOST,
        shared_from: int = SHARED_FROM,
        checksum: bool = False,
        refused: Callable[[str, str], None] = lambda kind, remote: None,
    ) -> None:
        self._refused = refused
        is_sharing = shared_bytes > 0 and can_share()
        share = partial(SharedMemory, shared_bytes, shared_from) if is_sharing else None
        self._factory = ChannelFactory(limits, stall, pool, share, checksum)

    def listen(self, address: str) -> SocketListener:
        """Make the socket; `close` removes it, and the directory made for it."""
        path = _path_in(address)
        directory = None if path else _own_directory()
        path = path or os.path.join(str(directory), _SOCKET)
        try:
            _check_length(path)
            sock = _listening(path)
        except BaseException as error:
            _remove_directory(directory)
            if isinstance(error, OSError):
                raise UsageError(
                    f"cannot listen on unix://{path}: {reason_of(error)}",
                    hint="remove the file if no worker listens there any more",
                ) from error
            raise
        return SocketListener(
            sock,
            f"unix://{path}",
            wrap=lambda accepted: self._accepted(accepted, path),
            on_close=lambda: _remove(path, directory),
        )

    def connect(self, address: str, deadline: float, name: str | None = None) -> SocketChannel:
        """Connect to the listener at the path."""
        path = _path_in(address)
        if not path:
            raise UsageError(f"{address} does not say which path to connect to")
        _check_length(path)
        left = deadline - time.monotonic()
        if left <= 0:
            raise _unanswered(address)
        try:
            sock = _connected(path, left)
        except BlockingIOError as error:
            raise _unanswered(address) from error
        except OSError as error:
            raise PeerLost(f"cannot reach {address}: {reason_of(error)}") from error
        _, user = _peer_of(sock)
        if user != os.geteuid():
            sock.close()
            self._refused("another user's listener", address)
            raise NotTrusted(
                f"the listener on {address} is a process of another user, {user}",
                hint="run all workers of a machine as one user, or use TLS",
            )
        return self._factory.channel(sock, address)

    def _accepted(self, sock: socket.socket, path: str) -> SocketChannel | None:
        process, user = _peer_of(sock)
        if user != os.geteuid():
            sock.close()
            self._refused("another user", f"unix://{path} (user {user})")
            return None
        return self._factory.channel(sock, f"unix://{path} (process {process})")


def _own_directory() -> str:
    """Make a directory for a socket, and remove those that killed processes left behind."""
    made = tempfile.mkdtemp(prefix=f"gradwire-{os.getpid()}-")
    now = os.stat(made).st_mtime
    for left in os.scandir(tempfile.gettempdir()):
        with suppress(OSError):
            if _is_left_over(left, now - _LEFT_SECONDS):
                _remove(os.path.join(left.path, _SOCKET), left.path)
    return made


def _is_left_over(entry: os.DirEntry[str], before: float) -> bool:
    """Whether the directory was made by a gradwire process that is gone; False when in doubt."""
    named = _OWN.match(entry.name)
    if named is None or not entry.is_dir(follow_symlinks=False):
        return False
    found = entry.stat(follow_symlinks=False)
    if found.st_uid != os.geteuid() or found.st_mtime > before:
        return False
    try:
        os.kill(int(named[1]), 0)
    except ProcessLookupError:
        return not _is_listened_to(os.path.join(entry.path, _SOCKET))
    return False


def _is_listened_to(path: str) -> bool:
    """Whether a process listens there: it may be in another pid namespace."""
    try:
        _connected(path, 0.1).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    return True


def _path_in(address: str) -> str:
    parsed = parse_address(address)
    if parsed.scheme != "unix":
        raise UsageError(f"{address} is not a unix address", hint="unix:///path")
    return parsed.place


def _check_length(path: str) -> None:
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise UsageError(
            f"unix://{path} has a path of {length} bytes, over the limit of {_LONGEST_PATH}",
            hint="choose a shorter path, or a shorter TMPDIR",
        )


def _listening(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        # No peer can connect before `listen`, so the mode is never too wide.
        os.chmod(path, 0o600)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _connected(path: str, left: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not settimeout: a non-blocking unix connect fails at once when the backlog is full.
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, as_timeval(left))
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process id and user id of the peer, from the kernel."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def _unanswered(address: str) -> DeadlinePassed:
    return DeadlinePassed(f"{address} did not answer before the deadline")


def _remove(path: str, directory: str | None) -> None:
    with suppress(OSError):
        os.unlink(path)
    _remove_directory(directory)


def _remove_directory(directory: str | None) -> None:
    if directory is not None:
        with suppress(OSError):
            os.rmdir(directory)
