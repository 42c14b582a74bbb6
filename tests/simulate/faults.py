"""Which faults a history has, and what injects them.

Faults are timed by steps: the frames sent and arrived so far, of any kind or of a backward pass. So
a worker may crash between any two of them, even between two sends of one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import final

from gradwire.autograd.messages import Release
from gradwire.errors import GradwireError
from tests.simulate.links import Link
from tests.simulate.world import ANY, BACKWARD, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How many of each kind, within how many steps; `heal` says whether they end."""

    crashes: int = 0  # workers that stop in the middle; half of them are noticed only after a while
    cuts: int = 0  # links whose connections end, with what was on its way
    stalls: int = 0  # links over which nothing arrives, and nothing ends
    slow: int = 0  # links that take up to a second for each message
    repeats: float = 0.0  # how often a message that may come twice does
    lies: int = 0  # Releases of edges that lead to another worker than the one that sends it
    within: int = 150  # steps, the first of which a fault may follow
    spared: tuple[str, ...] = ()  # workers that do not crash
    heal: bool = True  # links are mended and workers restarted after a while; else never


@final
class Nemesis:
    """Injects the faults of one history, and knows whom they hit."""

    def __init__(self, world: World, faults: Faults, seed: int) -> None:
        self._world, self._faults = world, faults
        self._random = random.Random(f"faults {seed}")
        self.victims: set[str] = set()  # workers that a fault has hit, or a link of theirs
        self.may_be_silent = False  # whether there was a fault that only a deadline can notice
        self.liars: set[str] = set()  # workers that lied; nobody else may come to harm by that
        self._is_over = False
        kinds: list[Callable[[], None]] = [
            *[self._crash] * faults.crashes,
            *[partial(self._hit_link, "cut")] * faults.cuts,
            *[partial(self._hit_link, "stall")] * faults.stalls,
            *[partial(self._hit_link, "slow")] * faults.slow,
            *[self._lie] * faults.lies,
        ]
        for kind in kinds:
            act = partial(self._unless_over, kind)
            if self._random.random() < 0.5:
                world.at(BACKWARD, self._random.randint(1, max(2, faults.within // 5)), act)
            else:
                world.at(ANY, self._random.randint(1, faults.within), act)

    def end(self) -> None:
        """Nothing more happens; everything is mended now, if faults heal."""
        self._is_over = True
        self._world.spare()
        if self._faults.heal:
            for link in self._world.network.links.values():
                self._heal(link)
            if self._world.is_open:
                for name in self._world.names:
                    self._restart(name)

    def _crash(self) -> None:
        world, workers = self._world, self._world.workers()
        alive = [n for n in world.names if n in workers and n not in self._faults.spared]
        if not alive:
            return
        name = self._random.choice(alive)
        is_silent = self._random.random() < 0.4
        silent_for = self._random.choice((0.05, 0.5, 2.0)) if is_silent else 0.0
        self.victims.add(name)
        world.fault("silent crash" if is_silent else "crash", name)
        world.crash(name, silent_for=silent_for)
        if self._faults.heal and world.is_open:
            self._later(lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        world = self._world
        if not world.incarnations[name].is_dead:
            return
        links = [world.network.link(name, other) for other in world.names if other != name]
        if any(link.is_cut or link.is_stalled for link in links):
            self._later(lambda: self._restart(name))  # it could not meet the others
            return
        world.fault("restart", name)
        world.start_worker(name)

    def _hit_link(self, kind: str) -> None:
        a, b = self._random.sample(self._world.names, 2)
        self.victims |= {a, b}
        self.may_be_silent = True
        link = self._world.network.link(a, b)
        self._world.fault(kind, link.name)
        if kind == "cut":
            self._world.network.cut(link, silent_for=self._random.choice((0.0, 0.0, 0.1)))
        elif kind == "stall":
            link.is_stalled = True
        else:
            link.slowness = self._random.choice((10.0, 50.0, 300.0))
        if self._faults.heal:
            self._later(lambda: self._heal(link))

    def _lie(self) -> None:
        """A worker releases edges that lead to another."""
        world, workers = self._world, self._world.workers()
        name, other = self._random.sample(world.names, 2)
        if name not in workers or other not in workers:
            return
        liar, hit = workers[name].agent, workers[other].engine.edges
        edges = [n for n, sent in hit.sent.items() if sent.peer != liar.directory.me.id]
        if not edges:
            return
        self.liars.add(name)
        world.fault("lie", name, f"to {other}")

        def lie() -> None:
            with suppress(GradwireError):
                liar.tell(hit.me, Release(edges), deadline=liar.clock.now() + 1.0)

        world.run_as(name, "lie", lie)

    def _heal(self, link: Link) -> None:
        if link.is_cut or link.is_stalled or link.slowness != 1.0:
            self._world.fault("heal", link.name)
            self._world.network.heal(link)

    def _later(self, act: Callable[[], None]) -> None:
        seconds = 0.005 * 1200 ** self._random.random()
        scheduler = self._world.scheduler
        scheduler.at(scheduler.now + seconds, partial(self._unless_over, act))

    def _unless_over(self, act: Callable[[], None]) -> None:
        # What was due before the end may come only after it.
        if not self._is_over:
            act()
