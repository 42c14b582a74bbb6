"""A program of your own in a simulated world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gradwire.errors import GradwireError
from gradwire.options import Options
from gradwire.rpc.worker import Exposed
from gradwire.testing.simulate.faults import Faults, Nemesis
from gradwire.testing.simulate.world import World

T = TypeVar("T")


class Stuck(GradwireError):
    """A program did not end in the time it had, or nothing could happen any more."""


@dataclass(slots=True)
class Outcome(Generic[T]):
    """How a program ended: `result`, or the `error` that it raised; and all that happened."""

    result: T | None
    error: BaseException | None
    trace: list[str]
    counts: Counter[str]
    """faults that were injected and events of the workers, by kind"""
    seconds: float
    """on the simulated clock"""


def simulate(
    program: Callable[[], T],
    *,
    workers: int = 3,
    seed: int = 0,
    faults: Faults | None = None,
    expose: Exposed = (),
    options: Options | None = None,
    is_open: bool = False,
    seconds: float = 600.0,
) -> Outcome[T]:
    """Run a program as worker w0 of w0, w1, … in a simulated world; one seed, one history.

    Real workers run it: only threads, links and the clock are simulated, also in the modules you
    expose. w0 itself does not crash. In an open world the others come back after a crash, unless
    `Faults(heal=False)`. Raises `Stuck` if the program has not ended after so many seconds.

    >>> def step():
    ...     x = torch.ones(2, requires_grad=True)
    ...     gradwire.rpc_sync("w1", torch.mul, args=(x, 3)).sum().backward()
    ...     return x.grad.tolist()
    >>> simulate(step, workers=2, seed=1).result
    [3.0, 3.0]
    >>> print(simulate(step, workers=2, seed=3, faults=Faults(crashes=1, within=5)).error)
    w1 was lost: connection closed by peer [memory://w1.0], in the middle of p0.1
    """
    faults = faults or Faults()
    with World(
        seed,
        workers,
        options=options or Options(),
        expose=expose,
        is_open=is_open,
        repeats=faults.repeats,
        most_switches=10_000_000,
    ) as world:
        world.start()
        Nemesis(world, replace(faults, spared=(*faults.spared, "w0")), seed)
        return _run(world, program, seconds)


def _run(world: World, program: Callable[[], T], seconds: float) -> Outcome[T]:
    ended: list[Outcome[T]] = []

    def run() -> None:
        result, error = None, None
        try:
            result = program()
        except Exception as raised:
            error = raised.with_traceback(None)
        now = world.scheduler.now
        ended.append(Outcome(result, error, world.lines(), world.counts, now))

    world.run_as("w0", "program", run)
    world.scheduler.run(world.scheduler.now + seconds, lambda: bool(ended))
    if ended:
        return ended[0]
    waiting = ", ".join(task.name for task in world.scheduler.waiting()) or "nobody"
    last = "\n".join(world.lines()[-20:])
    raise Stuck(
        f"the program has not ended after {seconds:g} s; waiting: {waiting}; the last that "
        f"happened:\n{last}",
        hint="a lock or a queue of the program's own is simulated only in exposed modules",
    )
