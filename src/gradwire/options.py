"""What a user may set, with its defaults; the only reader of the environment.

Every wait in gradwire ends at one of the `Timeouts`. A timeout is a wish in seconds from now; at
the door it becomes a deadline on the monotonic clock, and no layer below adds its own.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlparse

from gradwire.errors import UsageError
from gradwire.ids import LAST_LIFE

FOREVER = 1e9
"""Seconds that stand for no deadline: more than any program runs, and less than what the waits of
Python and of the kernel overflow at. The loss of the peer ends such a wait, and nothing else.
"""


class _Default(float):
    """What a timeout is that was not given; told by identity."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: float = _Default(math.nan)
Timeout = float | None
"""Seconds; None or infinite: as long as the peer lives; DEFAULT: as the `Timeouts` say."""

_TLS_VARIABLES = ("GRADWIRE_TLS_CERT", "GRADWIRE_TLS_KEY", "GRADWIRE_TLS_CA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds each kind of wait may take."""

    join: float = 120.0
    """until every worker has arrived"""
    connect: float = 10.0
    """until a peer's listener has answered the handshake"""
    handshake: float = 5.0
    """until whoever connects has proven that it belongs to the job"""
    call: float = 60.0
    """until a call is answered, unless the call says otherwise"""
    backward: float = 300.0
    """until a whole backward pass is over; one that another worker began gets no more time here"""
    step: float = 60.0
    """until every owner of an optimizer's parameters has taken one step; a step that another worker
    asks for gets no more time here
    """
    shutdown: float = 60.0
    """until all have left, from when no program is known to run any more: each worker has called
    shutdown() too, or is lost
    """
    stall: float = 15.0
    """without progress in the middle of a message, before its connection is given up"""
    suspect: float = 5.0
    """without a sign of life from a connected peer, before the log and errors speak of it"""
    dead: float = 15.0
    """without a sign of life, before a peer is given up: more than any of its calls into C, which
    hold the interpreter, may take
    """

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(
                    f"timeout {name}={value!r} is not a positive, finite number of seconds"
                )
        if self.dead < self.suspect:
            raise UsageError(
                f"a peer would be dead after {self.dead:g} s, before it is suspect after "
                f"{self.suspect:g} s",
                hint="Timeouts(dead=…) is at least Timeouts(suspect=…)",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes checked before anything is allocated for a peer."""

    head: int = 1 << 26
    """bytes of a message without its tensors"""
    payload: int = 1 << 34
    """bytes of the tensors of one message"""
    tensors: int = 1 << 16
    """tensors in one message"""
    dimensions: int = 64
    """of one tensor; torch itself has no operators for more than 64"""
    depth: int = 64
    """containers within containers"""
    elements: int = 1 << 20
    """numbers, texts and containers in one message, wherever they are in it"""
    in_flight: int = 1 << 28
    """bytes of calls to one peer that have no answer yet; who would send more waits"""
    unserved: int = 1 << 32
    """bytes of messages of one peer that wait to be served; a peer that sends more is cut off"""
    connections: int = 8
    """that one peer has with this worker at a time"""
    pending_handshakes: int = 256
    """connections at once whose peer has not proven yet that it belongs to the job"""
    contexts: int = 1 << 12
    """that one peer has made known here and that are open still"""
    edges: int = 1 << 18
    """of one peer, over all contexts that are open here, and the depth of a graph"""
    passes: int = 1 << 16
    """over one context, begun by others, that this worker has heard of"""
    runs: int = 1 << 8
    """of backward passes that one peer began, under way here: each has a thread while it waits"""
    references: int = 1 << 18
    """to values of this worker, in the hands of one peer"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise UsageError(f"limit {name}={getattr(self, name)!r} is not a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How this worker proves its name to others, and whom it believes: three files in PEM format.

    `gradwire certs` makes them.
    """

    certificate: str
    """of this worker, for the name it joins by"""
    key: str
    """of the certificate; only its owner may read the file"""
    authority: str
    """that signed the certificates of all workers"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike) or not os.fspath(path):
                raise UsageError(f"Tls({name}={path!r}) is not the path of a file")
            object.__setattr__(self, name, os.fspath(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one worker meets the others and serves them."""

    init_method: str = "env://"
    """where workers find each other: env://, tcp://host:port or file:///path"""
    life: int = 0
    """how often this worker of a closed world was started again, under its name and rank, while the
    others went on; `run(restarts=…)` counts it, other launchers have to
    """
    is_open: bool = False
    """workers come and go, whatever WORLD_SIZE says; so it is also where no world size is known"""
    listen: str = "auto"
    """where peers reach this worker: unix, tcp://host:port, or auto: unix where workers meet on
    this machine, else the address from which it speaks to the meeting place
    """
    tls: Tls | None = None
    """certificates for connections between machines, which are plain tcp without; by default those
    that GRADWIRE_TLS_CERT, GRADWIRE_TLS_KEY and GRADWIRE_TLS_CA name, if they are set
    """
    shared_memory: bool = True
    """between workers of this machine, large tensors go through memory that both can write to"""
    secret: str | None = None
    """a file with the secret of the job, at least 32 bytes that only its owner can read (0600); by
    default the environment names it: GRADWIRE_SECRET_FILE, a descriptor in GRADWIRE_SECRET_FD, or
    the secret itself in GRADWIRE_SECRET
    """
    insecure: bool = False
    """speak beyond this machine without TLS: who can see the traffic can read and change it"""
    checksum: bool = False
    """the tensors that this worker sends have a checksum; messages themselves always have one"""
    pickle: bool = False
    """what is not data travels as pickles, between workers that all have this set: whoever may send
    one may run anything here
    """
    threads: int = 64
    """user functions that may run at once; those waiting for a nested call do not count"""
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError(f"threads={self.threads} would run no call", hint="at least 1")
        if not 0 <= self.life <= LAST_LIFE:
            raise UsageError(f"life={self.life} is not between 0 and {LAST_LIFE}")


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker of how many this process is, as a launcher says it."""

    rank: int | None
    world_size: int | None


def place_from_environment() -> Place:
    """RANK and WORLD_SIZE, as torchrun sets them."""
    return Place(_maybe_int("RANK"), _maybe_int("WORLD_SIZE"))


def tls_from_environment() -> Tls | None:
    """GRADWIRE_TLS_CERT, GRADWIRE_TLS_KEY and GRADWIRE_TLS_CA: all of them, or none."""
    found = {variable: os.environ.get(variable, "") for variable in _TLS_VARIABLES}
    if not any(found.values()):
        return None
    missing = [variable for variable, path in found.items() if not path]
    if missing:
        raise UsageError(
            f"the environment names a part of the files for TLS: {', '.join(missing)} is not set",
            hint=f"set all of {', '.join(_TLS_VARIABLES)}, or none",
        )
    certificate, key, authority = found.values()
    return Tls(certificate=certificate, key=key, authority=authority)


class _SecretVariables(NamedTuple):
    file: str
    descriptor: str
    text: str


SECRET_VARIABLES = _SecretVariables("GRADWIRE_SECRET_FILE", "GRADWIRE_SECRET_FD", "GRADWIRE_SECRET")
_INSECURE = "GRADWIRE_INSECURE"


@dataclass(frozen=True, slots=True)
class SecretSource:
    """Where the environment says that the secret is; at most one of them should be set."""

    file: str | None
    descriptor: int | None
    text: str | None = field(repr=False)

    @property
    def is_there(self) -> bool:
        """Whether any is set."""
        return (self.file, self.descriptor, self.text) != (None, None, None)


def secret_from_environment() -> SecretSource:
    """See `Options.secret`. The variables stay set: others of this process read them again."""
    file, descriptor, text = (os.environ.get(name) or None for name in SECRET_VARIABLES)
    if descriptor is not None and not descriptor.isdecimal():  # it may be the secret: not shown
        raise UsageError(f"the environment variable {SECRET_VARIABLES.descriptor} is not a number")
    return SecretSource(file, None if descriptor is None else int(descriptor), text)


def is_insecure_by_environment() -> bool:
    """GRADWIRE_INSECURE=1, for programs that cannot pass `Options.insecure`."""
    return os.environ.get(_INSECURE) == "1"


def faults_from_environment() -> str:
    """GRADWIRE_FAULTS: what is to go wrong in this process; see agent/failpoints.py."""
    return os.environ.get("GRADWIRE_FAULTS", "")


def hand_down_secret(path: str) -> None:
    """The processes that this one starts find their secret in this file."""
    os.environ[SECRET_VARIABLES.file] = path


def rendezvous_host(init_method: str) -> str:
    """The machine where workers meet; empty for a file."""
    if init_method.startswith("env"):
        return os.environ.get("MASTER_ADDR", "")
    return urlparse(init_method).hostname or ""


def rendezvous_server(init_method: str, rank: int | None) -> tuple[str, int] | None:
    """Host and port of the store that another process serves; None for a file or a store of ours.

    Under torchrun its own agent may serve the store; otherwise rank 0 does.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    from_environment = init_method.startswith("env")
    if rank is None and from_environment:
        rank = _maybe_int("RANK")
    if rank is None or (rank == 0 and not by_agent):  # without a rank torch refuses, at once
        return None
    if from_environment:
        host, port = os.environ.get("MASTER_ADDR", ""), _maybe_int("MASTER_PORT")
    else:
        url = urlparse(init_method)
        host, port = url.hostname or "", url.port
    return (host, port) if host and port else None


def put_first_on_python_path(directory: str) -> None:
    """Where the Python processes that this one starts look for modules first."""
    already = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if directory not in already:
        os.environ["PYTHONPATH"] = os.pathsep.join([directory, *already])


def _maybe_int(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the environment variable {name}={text!r} is not a number") from None
