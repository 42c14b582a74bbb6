"""The specification of each worker of a run, and the files in the run's directory; no IO.

All files are in one private directory, so that even a killed worker leaves nothing behind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from gradwire.errors import UsageError
from gradwire.ids import LAST_INCARNATION
from gradwire.options import Options

ARGUMENTS = "arguments"
"""the file with the arguments of run(): the function, its arguments, what is exposed"""
SECRET = "secret"
"""the file with the secret of the run, unless its options name one"""
_UNSET = Options().init_method


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that one worker process needs to know."""

    name: str
    rank: int
    world_size: int
    options: Options
    directory: Path
    may_restart: bool = False
    """whether workers that die are restarted"""

    @property
    def returned(self) -> Path:
        """The file with the return value of the function."""
        return self.directory / "returned"

    @property
    def failure(self) -> Path:
        """The file with the error of this worker."""
        return self.directory / f"{self.name}.failure"


def check_arguments(
    world_size: int, options: Options, timeout: float | None, restarts: int = 0
) -> None:
    """Raise UsageError for invalid arguments of run()."""
    if type(restarts) is not int or not 0 <= restarts <= LAST_INCARNATION:
        raise UsageError(f"run(restarts={restarts!r}) is not a number from 0 to {LAST_INCARNATION}")
    if type(world_size) is not int or world_size < 1:
        raise UsageError(f"run() needs at least one worker, not world_size={world_size!r}")
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise UsageError(
            f"run(timeout={timeout!r}) is not a positive, finite number of seconds",
            hint="leave timeout= out for no limit",
        )
    if options.incarnation:
        raise UsageError("run() numbers the incarnations itself", hint="leave incarnation= out")
    if options.init_method != _UNSET:
        raise UsageError(
            f"run() makes its own rendezvous, and cannot use {options.init_method}",
            hint="leave init_method out, or start each worker yourself with init_rpc()",
        )


def worker_specs(
    world_size: int, options: Options, directory: Path, may_restart: bool = False
) -> list[WorkerSpec]:
    """The specifications of workers w0, w1, … of one run."""
    shared = replace(
        options,
        init_method=f"file://{directory / 'rendezvous'}",
        secret=options.secret or str(directory / SECRET),
    )
    specs = []
    for rank in range(world_size):
        own = _socket(directory, rank) if options.listen in ("auto", "unix") else options.listen
        own_options = replace(shared, listen=own)
        specs.append(WorkerSpec(f"w{rank}", rank, world_size, own_options, directory, may_restart))
    return specs


def restarted(spec: WorkerSpec) -> WorkerSpec:
    """The specification of a worker's next incarnation.

    Its socket has a new name: a peer that still connects to the old incarnation must not reach it.
    """
    listen, incarnation = spec.options.listen, spec.options.incarnation + 1
    if listen.startswith(f"unix://{spec.directory}"):
        listen = _socket(spec.directory, spec.rank, f".{incarnation}")
    return replace(spec, options=replace(spec.options, incarnation=incarnation, listen=listen))


def _socket(directory: Path, rank: int, suffix: str = "") -> str:
    return f"unix://{directory / f'w{rank}{suffix}.socket'}"
