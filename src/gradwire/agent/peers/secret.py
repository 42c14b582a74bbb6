"""The secret of a job, which authenticates its members and what they write into its store.

It comes from a file that only its owner can read, from an inherited file descriptor, or from the
environment. There is no default. It never appears in a log, an error, a repr or a command line, and
is never sent: only keys derived from it are used. The environment variable is not removed after
reading: a process may become a worker again, and its children need the secret as well.

torch's TCPStore listens on all interfaces and authenticates nobody; a file may be writable by
others. So each value in a `SignedStore` carries an HMAC-SHA256, bound to its name and, where the
writer knows it, to the round of joining. A bad signature is refused before parsing. Who can write
to the store can still delete a value, restore an older one, or change a counter, which is not
signed. Then joining fails by its timeout, and the handshake keeps impostors out.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import select
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, final

from torch.distributed import Store  # type: ignore[attr-defined]

from gradwire.agent.peers.refusals import Refusals
from gradwire.current import ProcessValue
from gradwire.errors import NotTrusted, UsageError
from gradwire.options import SECRET_VARIABLES, Options, secret_from_environment

LEAST_BYTES = 32
_MOST_BYTES = 4096
_PRIVATE = 0o600
_READ_SECONDS = 5.0
_HEX_BYTES = 64
_LENGTHS = struct.Struct(">QQ")
_FROM_PIPE: ProcessValue[tuple[int, bytes]] = ProcessValue()
"""The descriptor of a pipe and what was read from it: it can be read only once."""
_MAKE_ONE = (
    "python -m gradwire secret --out FILE; then "
    f"Options(secret=FILE) or {SECRET_VARIABLES.file}=FILE for every worker. On one machine, "
    "gradwire.run(), torchrun and python -m gradwire.compat need none"
)
_SHARED_NAME = "gradwire-secret"
_SHARED_PATH = re.compile(r"/proc/\d{1,10}/fd/\d{1,10}")


@final
class Secret:
    """At least 32 bytes, known to the workers of one job."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes, origin: str = "a secret") -> None:
        if len(data) < LEAST_BYTES:
            raise UsageError(
                f"the secret in {origin} has {len(data)} bytes, and needs at least {LEAST_BYTES}",
                hint=_MAKE_ONE,
            )
        self._data = data

    def __repr__(self) -> str:
        return "<Secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled")

    def key(self, purpose: str) -> bytes:
        """A key for one purpose, which reveals nothing about the keys for others."""
        return hmac.digest(self._data, f"key of gradwire: {purpose}".encode(), "sha256")


def fresh_secret() -> Secret:
    """A new random secret."""
    return Secret(secrets.token_bytes(LEAST_BYTES))


def new_secret_text() -> str:
    """A new secret, as a file of it contains it."""
    return secrets.token_hex(LEAST_BYTES)


def write_secret(path: Path) -> str:
    """Write a new secret to a new file of mode 600; returns the path, for `Options.secret`."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _PRIVATE)
    with os.fdopen(file, "w", encoding="ascii") as opened:
        opened.write(new_secret_text())
    return str(path)


@contextmanager
def in_memory(name: str, data: bytes) -> Iterator[str]:
    """The path of these bytes for processes of this user and machine, until the end of the block.

    They are in memory that is reached through this process, so they are gone when it is killed.
    """
    file = os.memfd_create(name)
    try:
        os.fchmod(file, _PRIVATE)
        os.write(file, data)
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


@contextmanager
def shared_secret() -> Iterator[str]:
    """The path of a new secret in memory, until the end of the block."""
    with in_memory(_SHARED_NAME, new_secret_text().encode()) as path:
        yield path


def read_shared(path: str) -> Secret:
    """The secret at such a path; FileNotFoundError if it is gone.

    Whoever can write to the rendezvous store names the path. So nothing else is read: only memory
    of this name that belongs to this user, whose content no attacker knows.
    """
    if _SHARED_PATH.fullmatch(path) is None:
        raise NotTrusted(
            f"the rendezvous store names {path!r:.200} as the place of the secret",
            hint="an attacker may have written it; GRADWIRE_SECRET_FILE names a secret by hand",
        )
    if _SHARED_NAME not in os.readlink(path):
        raise FileNotFoundError(f"{path} belongs to another program by now")
    return _in_file(path)


def find_secret(options: Options) -> Secret:
    """The secret that the options name, or else the environment."""
    if options.secret is not None:
        return _in_file(options.secret)
    found = secret_from_environment()
    if len(found) > 1:
        raise UsageError(
            f"more than one of {', '.join(SECRET_VARIABLES)} is set", hint="leave one of them"
        )
    match found:
        case {SECRET_VARIABLES.file: path}:
            return _in_file(path)
        case {SECRET_VARIABLES.descriptor: number}:
            return _in_descriptor(int(number))
        case {SECRET_VARIABLES.text: text}:
            return _stripped(os.fsencode(text), SECRET_VARIABLES.text)
        case _:
            raise UsageError("this worker was given no secret", hint=_MAKE_ONE)


def has_secret(options: Options) -> bool:
    """Whether the options or the environment name a secret."""
    return options.secret is not None or bool(secret_from_environment())


def _in_file(path: str) -> Secret:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UsageError(f"the secret in {path} cannot be read: {error}", hint=_MAKE_ONE) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"the secret in {path} is not in a file", hint=_MAKE_ONE)
        if status.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"the secret in {path} belongs to user {status.st_uid}, who can change it",
                hint=f"make it a file of your own: chown {os.geteuid()} {path}",
            )
        # A secret that Kubernetes mounts belongs to root, and to the group of the pod's user.
        others = 0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
        if status.st_mode & others:
            raise UsageError(
                f"the secret in {path} can be read or written by other users "
                f"(mode {stat.S_IMODE(status.st_mode):04o})",
                hint=f"chmod 600 {path}, and make a new secret: this one may be known",
            )
        return _stripped(_read_all(file, path), path)
    finally:
        os.close(file)


def _in_descriptor(number: int) -> Secret:
    origin = f"{SECRET_VARIABLES.descriptor}={number}"
    try:
        data = os.pread(number, _MOST_BYTES + 1, 0)
    except OSError:  # a pipe, or nothing
        known, data = _FROM_PIPE.value or (None, b"")
        if known != number:
            data = _read_all(number, origin)
            _FROM_PIPE.value = (number, data)
    return _stripped(data, origin)


def _read_all(number: int, origin: str) -> bytes:
    """Read to the end: for a pipe, until the writing end is closed."""
    data = b""
    try:
        while len(data) <= _MOST_BYTES:
            if not select.select([number], [], [], _READ_SECONDS)[0]:
                raise UsageError(
                    f"the secret in {origin} did not end within {_READ_SECONDS:g} s",
                    hint="close the writing end of the pipe when the secret is written",
                )
            more = os.read(number, _MOST_BYTES)
            if not more:
                break
            data += more
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the secret in {origin} cannot be read: {error}",
            hint="pass the descriptor on when the process is started (pass_fds)",
        ) from error
    return data


def _stripped(data: bytes, origin: str) -> Secret:
    """The secret without the newline that editors add at the end."""
    if len(data) > _MOST_BYTES:
        raise UsageError(f"the secret in {origin} is longer than {_MOST_BYTES} bytes")
    return Secret(data.rstrip(b"\r\n"), origin)


# -- the signed store


def signed(key: bytes, name: str, value: str, round: str = "") -> str:
    """The value with its signature before it."""
    said = [part.encode() for part in (name, round, value)]
    lengths = _LENGTHS.pack(len(said[0]), len(said[1]))
    return hmac.new(key, lengths + b"".join(said), "sha256").hexdigest() + value


def verified(key: bytes, name: str, text: bytes, round: str = "") -> str | None:
    """The value, if it was signed with this key for this name and round."""
    try:
        value = text[_HEX_BYTES:].decode()
    except UnicodeDecodeError:
        return None
    good = hmac.compare_digest(text, signed(key, name, value, round).encode())
    return value if good else None


@final
class SignedStore:
    """The operations of torch's stores that joining needs, with signed values."""

    def __init__(
        self, store: Store, secret: Secret | None, refusals: Refusals, offered: str | None = None
    ) -> None:
        self.inner, self._refusals = store, refusals
        self.secret = secret
        """None until it is known which one rank 0 has made"""
        self.offered = offered
        """the path of the secret that this worker has made for all"""

    @property
    def _key(self) -> bytes:
        assert self.secret is not None, "no value can be signed or verified yet"
        return self.secret.key("rendezvous")

    def set(self, name: str, value: str, round: str = "") -> None:
        """Sign and write."""
        self.inner.set(name, signed(self._key, name, value, round))

    def get(self, name: str, round: str = "") -> str:
        """The value; NotTrusted if it was not signed with the secret."""
        value = verified(self._key, name, self.inner.get(name), round)
        if value is None:
            self._refusals.count("rendezvous", name)
            raise NotTrusted(
                f"the value of {name!r} in the rendezvous store was not signed with this "
                "worker's secret",
                hint="give every worker of the job the same secret, Options(secret=…) or "
                "GRADWIRE_SECRET_FILE, and other jobs another store; else an attacker may have "
                "written it",
            )
        return value

    def maybe_get(self, name: str, round: str = "") -> str | None:
        """The value, None if there is none."""
        return self.get(name, round) if self.inner.check([name]) else None

    def replace(self, name: str, old: str | None, new: str) -> bool:
        """Replace the old value; False if the store holds another one by now."""
        if new == old:
            return True
        before = "" if old is None else signed(self._key, name, old)
        after = signed(self._key, name, new)
        return bool(self.inner.compare_set(name, before, after).decode() == after)

    def add(self, name: str, amount: int) -> int:
        """Add to a counter. Counters are not signed: no trust may rest on their value."""
        return int(self.inner.add(name, amount))

    def has(self, names: list[str]) -> bool:
        """Whether all of these names have a value, signed or not."""
        return bool(self.inner.check(names))
