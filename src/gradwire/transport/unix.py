"""Frames over a unix socket, between processes of one user on one host.

Large payloads go through shared memory (shared_memory.py) where both ends have it.

The socket has mode 0600, and without a given path it lies in a new directory of mode 0700. Both
ends also check (SO_PEERCRED) that the other runs as the same user: the mode may have been widened
by hand, and in a directory that others can write to, another user may have replaced the socket.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import final

from gradwire.errors import NotTrusted, UsageError
from gradwire.options import Limits
from gradwire.transport.address import parse_address
from gradwire.transport.buffer_pool import BlockPool
from gradwire.transport.shared_memory import SHARED_AT_MOST, SHARED_FROM, SharedMemory, can_share
from gradwire.transport.sockets import stream
from gradwire.transport.sockets.channel import LIMITS, STALL, SocketChannel, as_timeval

_LONGEST_PATH = 107
_OWN = re.compile(r"gradwire-(\d+)-")
_SOCKET = "socket"
_LEFT_SECONDS = 60.0  # a younger directory may be about to get its socket
_CREDENTIALS = struct.Struct("iII")


@final
class UnixTransport:
    """The transport for unix:///path, or unix:// for a generated path.

    Each channel makes at most `shared_bytes` of shared memory, or none, for payloads of
    `shared_from` bytes or more. `refused(kind, address)` is called for a peer of another user.
    """

    def __init__(
        self,
        *,
        limits: Limits = LIMITS,
        stall: float = STALL,
        shared_bytes: int = SHARED_AT_MOST,
        shared_from: int = SHARED_FROM,
        checksum: bool = False,
        refused: Callable[[str, str], None] = lambda kind, remote: None,
    ) -> None:
        self._refused = refused
        self._share: Callable[[], SharedMemory | None] = lambda: None
        if shared_bytes > 0 and can_share():
            self._share = partial(SharedMemory, shared_bytes, shared_from)
        self._channel = partial(
            SocketChannel, limits=limits, stall=stall, pool=BlockPool(), checksum=checksum
        )

    def listen(self, address: str) -> stream.SocketListener:
        """Make the socket; `close` removes it, and the directory made for it."""
        path = parse_address(address, "unix").place
        directory = None if path else _own_directory()
        path = path or os.path.join(str(directory), _SOCKET)
        try:
            _check_length(path)
            sock = stream.listening_socket(socket.AF_UNIX, path)
        except BaseException as error:
            if directory is not None:
                _remove(path, directory)
            if isinstance(error, OSError):
                raise UsageError(
                    f"cannot listen on unix://{path}: {stream.reason_of(error)}",
                    hint="remove the file if no worker listens there any more",
                ) from error
            raise
        return stream.SocketListener(
            sock,
            f"unix://{path}",
            wrap=lambda accepted: self._accepted(accepted, path),
            on_close=lambda: _remove(path, directory),
        )

    def connect(self, address: str, deadline: float, name: str | None = None) -> SocketChannel:
        """Connect to the listener at the path."""
        path = parse_address(address, "unix").place
        if not path:
            raise UsageError(f"{address} does not say which path to connect to")
        _check_length(path)
        with stream.connecting_to(address):
            sock = _connected(path, stream.seconds_until(deadline))
        _, user = _peer_of(sock)
        if user != os.geteuid():
            sock.close()
            self._refused("another user's listener", address)
            raise NotTrusted(
                f"the listener on {address} is a process of another user, {user}",
                hint="run all workers of a machine as one user, or use TLS",
            )
        return self._channel(sock, address, shared=self._share())

    def _accepted(self, sock: socket.socket, path: str) -> SocketChannel | None:
        process, user = _peer_of(sock)
        if user != os.geteuid():
            sock.close()
            self._refused("another user", f"unix://{path} (user {user})")
            return None
        remote = f"unix://{path} (process {process})"
        return self._channel(sock, remote, shared=self._share())


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
        try:  # a process in another pid namespace may listen there
            _connected(os.path.join(entry.path, _SOCKET), 0.1).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return True
    return False


def _check_length(path: str) -> None:
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise UsageError(
            f"unix://{path} has a path of {length} bytes, over the limit of {_LONGEST_PATH}",
            hint="choose a shorter path, or a shorter TMPDIR",
        )


def _connected(path: str, left: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not settimeout: a non-blocking unix connect fails at once when the backlog is full.
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, as_timeval(left))
        sock.connect(path)
    except BaseException as error:
        sock.close()
        if isinstance(error, BlockingIOError):
            raise TimeoutError from error
        raise
    return sock


def _peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process id and user id of the peer, from the kernel."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def _remove(path: str, directory: str | None) -> None:
    with suppress(OSError):
        os.unlink(path)
    if directory is not None:
        with suppress(OSError):
            os.rmdir(directory)
