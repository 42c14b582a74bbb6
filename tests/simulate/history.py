"""One history: a world, its programs and its faults, all from one seed; what was checked of it.

`play` runs random programs, `simulate` one of your own.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from gradwire.errors import DeadlinePassed
from gradwire.options import Options, Timeouts
from gradwire.rpc.worker import Exposed, Worker
from tests.simulate import programs
from tests.simulate.faults import Faults, Nemesis
from tests.simulate.programs import Script, random_script
from tests.simulate.scheduler import Runaway, Stuck, Task
from tests.simulate.stage import StepRun
from tests.simulate.world import World

TIMEOUTS = Timeouts(
    call=5, backward=8, connect=2, handshake=2, join=20, shutdown=10, suspect=2, dead=6
)
T = TypeVar("T")
_NOTICED_SECONDS = 2.5  # the longest that the end of a worker stays unseen by its peers
_SETTLED_SECONDS = 1.0
_LOOK_SECONDS, _LOOKS = 5.0, 60
"""How often it is looked whether something is left, and how often at most: beyond every lease."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a seed stands for."""

    seed: int
    workers: int
    is_open: bool
    leaves: bool
    capacity: int
    faults: Faults
    scripts: tuple[Script, ...]

    def lines(self) -> list[str]:
        """As people read it."""
        mode = "faults heal" if self.faults.heal else "faults never heal"
        world = "open" if self.is_open else "closed"
        return [
            f"seed {self.seed}: {self.workers} workers, {world} world, {mode}, "
            f"room for {self.capacity} messages while a link is stalled"
            + (", all leave in the end" if self.leaves else ""),
            f"  {self.faults}",
            *(f"  {script.describe()}" for script in self.scripts),
        ]


@dataclass(slots=True)
class History:
    """What happened, and which promises were broken."""

    setting: Setting
    violations: list[str]
    trace: list[str]
    counts: Counter[str]
    switches: int


def setting_of(seed: int, *, liveness: bool = False) -> Setting:
    """All that is derived from a seed."""
    chosen = random.Random(f"setting {seed} {liveness}")
    workers = chosen.choice((2, 3, 3, 4))
    names = [f"w{n}" for n in range(workers)]
    is_open = chosen.random() < 0.5
    tickets = count(1)
    roots = chosen.sample(names, chosen.choice((1, 1, 2)))
    steps = 2 if len(roots) == 1 else 1
    leaves = chosen.random() < 0.2
    capacity = chosen.choice((2, 1 << 20))
    kinds: dict[str, Any] = Counter(
        chosen.choice(("crashes", "crashes", "cuts", "stalls", "slow"))
        for _ in range(chosen.choice((0, 1, 1, 1, 2, 3)))
    )
    within = chosen.choice((20, 60, 150))
    repeats = chosen.choice((0.0, 0.0, 0.1, 0.5))
    scripts = tuple(random_script(chosen, root, names, tickets, steps) for root in roots)
    kinds["lies"] = chosen.choice((0, 0, 1, 3))
    faults = Faults(**kinds, heal=not liveness, within=within, repeats=repeats)
    return Setting(seed, workers, is_open, leaves, capacity, faults, scripts)


def play(setting: Setting) -> History:
    """Run one history and check it."""
    with World(
        setting.seed,
        setting.workers,
        options=Options(timeouts=TIMEOUTS),
        expose=[programs],
        is_open=setting.is_open,
        capacity=setting.capacity,
        repeats=setting.faults.repeats,
    ) as world:
        world.start()
        violations = _Playing(world, setting).run()
    return History(setting, violations, world.lines, world.counts, world.scheduler.switches)


class _Playing:
    """The acts of one history."""

    def __init__(self, world: World, setting: Setting) -> None:
        self._world, self._setting = world, setting
        self._nemesis = Nemesis(world, setting.faults, setting.seed)
        self._stage = world.scheduler.stage = StepRun(world, self._nemesis)

    def run(self) -> list[str]:
        """All acts; what was violated."""
        try:
            self._play({f"{s.root}'s": s for s in self._setting.scripts}, "the program")
            for act in (self._mend, self._recover, self._look_around, self._maybe_leave):
                if not self._stage.violations:
                    act()
        except Runaway as runaway:
            self._stage.violate("I3", str(runaway))
        for name, error in self._world.scheduler.errors:
            self._stage.violate("I3", f"{name} ended with {error!r}")
        return self._stage.violations

    def _play(self, scripts: dict[str, Script], what: str) -> None:
        """Until each is over, or its worker gone."""
        tasks = [
            self._world.run_as(script.root, what, partial(self._stage.play, script, name))
            for name, script in scripts.items()
        ]
        self._run_to_their_end(tasks, 200.0, "still waiting after 200 s: ")

    def _run_to_their_end(self, tasks: list[Task], seconds: float, otherwise: str) -> None:
        scheduler = self._world.scheduler
        if not scheduler.run(scheduler.now + seconds, lambda: all(t.has_ended() for t in tasks)):
            late = ", ".join(task.name for task in tasks if not task.has_ended())
            self._stage.violate("I3", f"{otherwise}{late}")

    def _mend(self) -> None:
        """No more faults; then peers notice silent crashes, and restarted workers join."""
        world = self._world
        self._nemesis.end()
        world.scheduler.run(world.scheduler.now + _NOTICED_SECONDS)
        if self._setting.is_open and self._setting.faults.heal:
            limit = world.scheduler.now + 2 * TIMEOUTS.join
            if not world.scheduler.run(limit, world.are_all_here):
                self._stage.violate("I6", "a worker that was restarted did not join")

    def _recover(self) -> None:
        """The next pass is exact, among all that live and can speak with each other."""
        names = list(self._world.workers())
        if not self._setting.faults.heal:
            names = [name for name in names if name not in self._nemesis.victims]
        if len(names) < 2:
            return
        chosen = random.Random(f"recovery {self._setting.seed}")
        script = random_script(chosen, chosen.choice(names), names, count(10_000), 1)
        known = len(self._stage.errors)
        self._play({"recovery": script}, "recovery")
        for error in self._stage.errors[known:]:
            self._stage.violate("I6", f"the next pass failed: {error}")

    def _look_around(self) -> None:
        """Gradients are what good passes gave, and nothing is left."""
        world, stage = self._world, self._stage
        world.scheduler.run(world.scheduler.now + _SETTLED_SECONDS)
        gc.collect()
        world.scheduler.run(world.scheduler.now + _SETTLED_SECONDS)
        for _ in range(_LOOKS):
            if not self._left():
                break
            world.scheduler.run(world.scheduler.now + _LOOK_SECONDS)
        for text in self._left():
            stage.violate("I4", text)
        for name, text in world.refusals:
            if name not in self._nemesis.liars:
                stage.violate("I7", text)
        for name in stage.parts:
            stage.check_part(name)

    def _left(self) -> list[str]:
        links = self._world.network.links.values()
        if not self._setting.faults.heal and any(link.is_stalled for link in links):
            return []  # who cannot be reached cannot be told to forget
        with self._world.scheduler.aside():
            return [text for worker in self._world.workers().values() for text in leaks(worker)]

    def _maybe_leave(self) -> None:
        """All shut down together, by the deadline, which begins when a silent peer is given up.

        Where faults never heal, a worker may give up on another: then it says so and raises.
        """
        if not self._setting.leaves:
            return

        def leave(worker: Worker) -> None:
            try:
                worker.shutdown(graceful=True)
            except DeadlinePassed:
                if self._setting.faults.heal:
                    raise

        workers = self._world.workers().items()
        tasks = [self._world.run_as(name, "shutdown", partial(leave, w)) for name, w in workers]
        limit = TIMEOUTS.dead + TIMEOUTS.shutdown + 5.0
        self._run_to_their_end(tasks, limit, "did not end: ")


def leaks(worker: Worker) -> list[str]:
    """Each table that is not empty, for people."""
    edges = worker.engine.edges
    found = {
        "edges sent": len(edges.sent),
        "edges received": len(edges.received),
        "edges to release": len(edges.to_tell),
        "joins": len(edges.joins),
        "contexts": len(worker.engine.contexts),
        "passes": len(worker.engine.passes),
        "calls in flight": worker.agent.in_flight,
        "jobs": worker.agent.dispatch.active,
        **{f"references {name}": n for name, n in asdict(worker.refs.statistics()).items()},
    }
    return [f"{worker.name} still has {n} {what}" for what, n in found.items() if n]


# -- programs of your own


@dataclass(slots=True)
class Outcome(Generic[T]):
    """How a program ended: `result`, or the `error` that it raised; and all that happened."""

    result: T | None
    error: BaseException | None
    trace: list[str]
    counts: Counter[str]  # faults that were injected and events of the workers, by kind
    seconds: float  # on the simulated clock


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
        ended.append(Outcome(result, error, world.lines[:], world.counts, now))

    world.run_as("w0", "program", run)
    if world.scheduler.run(world.scheduler.now + seconds, lambda: bool(ended)):
        return ended[0]
    waiting = ", ".join(task.name for task in world.scheduler.waiting()) or "nobody"
    last = "\n".join(world.lines[-20:])
    raise Stuck(
        f"the program has not ended after {seconds:g} s; waiting: {waiting}; the last that "
        f"happened:\n{last}",
        hint="a lock or a queue of the program's own is simulated only in exposed modules",
    )
