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
from gradwire.ids import LAST_INCARNATION
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
    comes_back: bool = False
    """whether workers are started again when they die"""

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


def check(world_size: int, options: Options, timeout: float | None, restarts: int = 0) -> None:
    """Refuse what no run could follow."""
    if type(restarts) is not int or not 0 <= restarts <= LAST_INCARNATION:
        raise UsageError(f"run(restarts={restarts!r}) is not a number from 0 to {LAST_INCARNATION}")
    if type(world_size) is not int or world_size < 1:
        raise UsageError(f"run() needs at least one worker, not world_size={world_size!r}")
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise UsageError(
            f"run(timeout={timeout!r}) is not a positive, finite number of seconds",
            hint="without timeout= the function may take as long as it likes",
        )
    if options.incarnation:
        raise UsageError(
            "run() counts the lives of its workers itself", hint="leave incarnation= out"
        )
    if options.init_method != _UNSET:
        raise UsageError(
            f"run() makes a meeting place of its own, and cannot use {options.init_method}",
            hint="leave init_method out, or start each worker yourself with init_rpc()",
        )


def orders_for(
    world_size: int, options: Options, directory: Path, *, comes_back: bool = False
) -> list[Orders]:
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
            comes_back,
        )
        for rank in range(world_size)
    ]


def orders_again(orders: Orders) -> Orders:
    """What a worker is told in its next life.

    Its socket has another name: who still looks for the earlier life must not find this one.
    """
    options, life = orders.options, orders.options.incarnation + 1
    listen = options.listen
    if listen.startswith(f"unix://{orders.directory}"):
        listen = _socket(orders.directory, orders.rank, life)
    return replace(orders, options=replace(options, incarnation=life, listen=listen))


def _listen(options: Options, directory: Path, rank: int) -> str:
    return _socket(directory, rank) if options.listen in ("auto", "unix") else options.listen


def _socket(directory: Path, rank: int, life: int = 0) -> str:
    return (
        f"unix://{directory / f'w{rank}.{life}.socket'}"
        if life
        else (f"unix://{directory / f'w{rank}.socket'}")
    )
