"""Which workers `run` starts, what each is told, and where they leave things for each other.

Pure. The workers of a run live in its private directory: their sockets, the meeting place, what
they were given and what they bring back all lie there, so that nothing is left in the file system
even by one that was killed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from gradwire.errors import UsageError
from gradwire.options import Options

_UNSET = Options().init_method


@dataclass(frozen=True, slots=True)
class Orders:
    """What one worker is told."""

    name: str
    rank: int
    world_size: int
    options: Options
    directory: Path

    @property
    def is_caller(self) -> bool:
        """Whether this worker runs the function; the others serve it."""
        return self.rank == 0

    @property
    def returned(self) -> Path:
        """What the function returned."""
        return self.directory / "returned"

    @property
    def failure(self) -> Path:
        """Why this worker gave up."""
        return self.directory / f"{self.name}.failure"


def given_in(directory: Path) -> Path:
    """What run() was given: the function, its arguments, what is exposed."""
    return directory / "given"


def secret_in(directory: Path) -> Path:
    """The secret of the run, unless its options name one."""
    return directory / "secret"


def check(world_size: int, options: Options, timeout: float | None) -> None:
    """Refuse what no run could follow."""
    if type(world_size) is not int or world_size < 1:
        raise UsageError(f"run() needs at least one worker, not world_size={world_size!r}")
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise UsageError(
            f"run(timeout={timeout!r}) is not a positive, finite number of seconds",
            hint="without timeout= the function may take as long as it likes",
        )
    if options.init_method != _UNSET:
        raise UsageError(
            f"run() makes a meeting place of its own, and cannot use {options.init_method}",
            hint="leave init_method out, or start each worker yourself with init_rpc()",
        )


def orders_for(world_size: int, options: Options, directory: Path) -> list[Orders]:
    """The workers w0, w1, … of one run."""
    meeting = f"file://{directory / 'meeting'}"
    return [
        Orders(
            f"w{rank}",
            rank,
            world_size,
            replace(
                options,
                init_method=meeting,
                listen=_listen(options, directory, rank),
                secret=options.secret or str(secret_in(directory)),
            ),
            directory,
        )
        for rank in range(world_size)
    ]


def _listen(options: Options, directory: Path, rank: int) -> str:
    if options.listen in ("auto", "unix"):
        return f"unix://{directory / f'w{rank}.socket'}"
    return options.listen
