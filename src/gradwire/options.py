"""Options, Timeouts and Limits with their defaults, and all reads of the environment.

Every wait ends at one of the `Timeouts`. Public functions turn a timeout in seconds into a deadline
on the monotonic clock; no layer below adds its own.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlparse

from gradwire.errors import UsageError
from gradwire.ids import LAST_INCARNATION
from gradwire.places import LAUNCHER_VARIABLE, Place, place_in

FOREVER = 1e9
"""Seconds that mean no deadline: no wait of Python or of the kernel overflows. Only the loss of the
peer ends such a wait.
"""


class _Default(float):
    """The type of DEFAULT, which is compared by identity."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: float = _Default(math.nan)
Timeout = float | None
"""Seconds; None or infinity: as long as the peer lives; DEFAULT: as in `Timeouts`."""
Output = Literal["auto", "named", "plain"]
"""Whether the output of a worker carries its name."""

_TLS_VARIABLES = ("GRADWIRE_TLS_CERT", "GRADWIRE_TLS_KEY", "GRADWIRE_TLS_CA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How many seconds each kind of wait may take."""

    join: float = 120.0
    """until every worker has arrived"""
    connect: float = 10.0
    """until a peer's listener has answered the handshake"""
    handshake: float = 5.0
    """until a connecting peer has proven that it belongs to the job"""
    call: float = 60.0
    """until a call is answered, unless the call has its own timeout"""
    backward: float = 300.0
    """until a whole backward pass is over; also limits the passes of other workers here"""
    step: float = 60.0
    """until every owner of parameters has stepped; also limits the steps of other workers here"""
    shutdown: float = 60.0
    """until all have left, once every worker has called shutdown() or is lost"""
    stall: float = 15.0
    """without progress in the middle of a message, before its connection is closed"""
    suspect: float = 5.0
    """of silence from a connected peer, before the log and errors mention it"""
    dead: float = 15.0
    """of silence, before a peer counts as lost: longer than its calls into C that hold the GIL"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise UsageError(
                    f"timeout {name}={value!r} is not a positive, finite number of seconds"
                )
            object.__setattr__(self, name, float(value))  # numpy's numbers are not sent
        if self.dead < self.suspect:
            raise UsageError(
                f"timeout dead={self.dead:g} is shorter than suspect={self.suspect:g}",
                hint="Timeouts(dead=…) must be at least Timeouts(suspect=…)",
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
    """of one tensor; torch has no operators for more than 64"""
    depth: int = 64
    """containers within containers"""
    elements: int = 1 << 20
    """numbers, strings and containers in one message, at all depths"""
    in_flight: int = 1 << 28
    """bytes of unanswered calls to one peer; a call that exceeds them waits"""
    unserved: int = 1 << 32
    """bytes of one peer's messages waiting to be served; a peer that sends more is disconnected"""
    connections: int = 8
    """of one peer with this worker at a time"""
    pending_handshakes: int = 256
    """connections at a time whose peer has not yet proven that it belongs to the job"""
    contexts: int = 1 << 12
    """of one peer that are open here"""
    edges: int = 1 << 18
    """that one peer has sent and this worker holds; also the depth of a graph"""
    passes: int = 1 << 16
    """of one coordinator that are known here"""
    runs: int = 1 << 8
    """of one peer's backward passes at a time; each has a thread while it waits"""
    references: int = 1 << 18
    """to values of this worker that one peer holds"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise UsageError(f"limit {name}={getattr(self, name)!r} is not a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Three files in PEM format that `gradwire certs` makes.

    `{name}` in a path stands for the name of the worker, as all processes of a launcher have the
    same environment.
    """

    certificate: str
    """of this worker, issued for the name that it joins with"""
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
    """How one worker joins the others and serves them."""

    init_method: str = "env://"
    """where workers find each other: env://, tcp://host:port or file:///path"""
    incarnation: int = 0
    """restarts of this worker of a closed world; `run(restarts=…)` sets it, other launchers must"""
    is_open: bool = False
    """workers come and go, and WORLD_SIZE is ignored; also the case if no world size is given"""
    listen: str = "auto"
    """where this worker listens: unix, tcp://host:port, or auto: unix if the rendezvous is on this
    machine, else the local address on the route to the rendezvous host; peers are told that address
    also for a wildcard such as tcp://0.0.0.0:29500
    """
    tls: Tls | None = None
    """for TLS between machines; by default GRADWIRE_TLS_CERT, GRADWIRE_TLS_KEY, GRADWIRE_TLS_CA"""
    shared_memory: bool = True
    """send large tensors between workers of this machine through memory that both can write to"""
    secret: str | None = None
    """a file with the secret of the job, at least 32 bytes, readable by its owner only (0600); by
    default from the environment: a file in GRADWIRE_SECRET_FILE, a descriptor in
    GRADWIRE_SECRET_FD, or the secret itself in GRADWIRE_SECRET
    """
    insecure: bool = False
    """allow traffic to other machines without TLS, where others can read and change it"""
    checksum: bool = False
    """add a checksum to the tensors that this worker sends; messages always have one"""
    pickle: bool = False
    """pickle what is not plain data, if all workers set this: a peer can run any code here then"""
    threads: int = 64
    """user functions that may run at a time; those waiting for a nested call do not count"""
    device_maps: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    """for each worker that is called, on which of its devices the tensors of a device here arrive:
    {"w1": {"cuda:0": "cuda:1"}}. Results and gradients return by the inverted map. A device that no
    map mentions is the same device there, found by its UUID
    """
    output: Output = "auto"
    """whether `run` puts the name of the worker before each line that it prints: named, plain, or
    auto: named on a terminal only
    """
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UsageError(f"threads={self.threads} would run no call", hint="at least 1")
        if self.output not in get_args(Output):
            raise UsageError(
                f"output={self.output!r:.80} is unknown", hint="it is auto, named or plain"
            )
        if not 0 <= self.incarnation <= LAST_INCARNATION:
            raise UsageError(
                f"incarnation={self.incarnation} is not between 0 and {LAST_INCARNATION}"
            )


def rank_and_size_from_environment() -> tuple[int | None, int | None]:
    """RANK and WORLD_SIZE, as torchrun sets them."""
    return _maybe_int("RANK"), _maybe_int("WORLD_SIZE")


_WORKERS_VARIABLE = "GRADWIRE_WORKERS"


def workers_from_environment() -> int | None:
    """How many workers `gradwire run -n` asked for."""
    return _maybe_int(_WORKERS_VARIABLE)


def with_workers(count: int, trace: str | None = None) -> dict[str, str]:
    """The environment of a program whose `run` starts so many workers, whatever started us."""
    found = {**os.environ, _WORKERS_VARIABLE: str(count), LAUNCHER_VARIABLE: "none"}
    return found if trace is None else {**found, _TRACE_VARIABLE: os.path.abspath(trace)}


_TRACE_VARIABLE = "GRADWIRE_TRACE"


def trace_from_environment() -> str | None:
    """GRADWIRE_TRACE: the file in which `run` traces the function that it calls."""
    return os.environ.get(_TRACE_VARIABLE) or None


def place_from_environment() -> Place | None:
    """The place that a launcher gave this process; None if no launcher has started it."""
    return place_in(os.environ)


def tls_from_environment() -> Tls | None:
    """GRADWIRE_TLS_CERT, GRADWIRE_TLS_KEY and GRADWIRE_TLS_CA: all of them, or none."""
    found = {variable: os.environ.get(variable, "") for variable in _TLS_VARIABLES}
    if not any(found.values()):
        return None
    missing = [variable for variable, path in found.items() if not path]
    if missing:
        raise UsageError(
            f"the environment names some of the TLS files, but {', '.join(missing)} is not set",
            hint=f"set all of {', '.join(_TLS_VARIABLES)}, or none",
        )
    certificate, key, authority = found.values()
    return Tls(certificate=certificate, key=key, authority=authority)


class _SecretVariables(NamedTuple):
    file: str
    descriptor: str
    text: str


SECRET_VARIABLES = _SecretVariables("GRADWIRE_SECRET_FILE", "GRADWIRE_SECRET_FD", "GRADWIRE_SECRET")


def secret_from_environment() -> dict[str, str]:
    """Those of SECRET_VARIABLES that are set; they stay set, for other workers of the process."""
    found = {name: value for name in SECRET_VARIABLES if (value := os.environ.get(name))}
    descriptor = SECRET_VARIABLES.descriptor
    if not found.get(descriptor, "0").isdecimal():  # it may be the secret: not shown
        raise UsageError(f"the environment variable {descriptor} is not a number")
    return found


def is_insecure_by_environment() -> bool:
    """GRADWIRE_INSECURE=1, for programs that cannot pass `Options.insecure`."""
    return os.environ.get("GRADWIRE_INSECURE") == "1"


def is_terminal_plain() -> bool:
    """Whether a terminal only adds lines: it cannot draw over them, or writes the log of a CI."""
    return os.environ.get("TERM") == "dumb" or bool(os.environ.get("CI"))


def faults_from_environment() -> str:
    """GRADWIRE_FAULTS: the faults to inject in this process; see testing/failpoints.py."""
    return os.environ.get("GRADWIRE_FAULTS", "")


def runtime_directory() -> Path:
    """Where a user's running jobs are written down, on this machine."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "gradwire"
    return Path(tempfile.gettempdir()) / f"gradwire-of-{os.getuid()}"


def hand_down_secret(path: str) -> None:
    """Let child processes read their secret from this file."""
    os.environ[SECRET_VARIABLES.file] = path


def rendezvous_host(init_method: str) -> str:
    """The host of the rendezvous store; empty for a file."""
    if init_method.startswith("env"):
        return os.environ.get("MASTER_ADDR", "")
    return _host_and_port(init_method)[0]


def rendezvous_server(init_method: str, rank: int | None) -> tuple[str, int] | None:
    """Host and port of a store that another process serves; None for a file or our own store.

    Under torchrun, its agent may serve the store; otherwise rank 0 does.
    """
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    from_environment = init_method.startswith("env")
    if rank is None and from_environment:
        rank = _maybe_int("RANK")
    if from_environment:
        host, port = rendezvous_host(init_method), _maybe_int("MASTER_PORT")
    else:
        host, port = _host_and_port(init_method)
    if rank is None or (rank == 0 and not by_agent):  # without a rank torch refuses, at once
        return None
    return (host, port) if host and port else None


def store_of_launcher(init_method: str) -> str | None:
    """Where torchrun's agent hosts a store, if this URL is one at which nobody would host one.

    Under torchrun, torch makes each process a client, whatever the URL.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "tcp" not in init_method[:4]:
        return None
    agent = os.environ.get("MASTER_ADDR", ""), _maybe_int("MASTER_PORT")
    return None if _host_and_port(init_method) == agent else f"{agent[0]}:{agent[1]}"


def _host_and_port(url: str) -> tuple[str, int | None]:
    asked = urlparse(url)
    if asked.netloc.count(":") > 1 and not asked.netloc.startswith("["):
        raise UsageError(
            f"no rendezvous at {url}: an IPv6 address needs brackets",
            hint=f"{asked.scheme}://[ADDRESS]:PORT",
        )
    try:
        return asked.hostname or "", asked.port
    except ValueError as error:
        raise UsageError(
            f"no rendezvous at {url}: {error}", hint=f"{asked.scheme}://HOST:PORT"
        ) from error


def put_first_on_python_path(directory: str) -> None:
    """Let Python child processes look for modules in this directory first."""
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
