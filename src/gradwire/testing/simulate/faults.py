"""Which faults a history has, and who injects them.

Faults are timed by steps: the frames sent and arrived so far, of any kind or of a backward pass. So
a worker may crash between any two of them, also between two words of one thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from gradwire.testing.simulate.pipes import Link
from gradwire.testing.simulate.world import ANY, BACKWARD, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How many of each kind, within how many steps; `heal` says whether they end."""

    crashes: int = 0
    """workers that stop in the middle; half of them are noticed only after a while"""
    cuts: int = 0
    """links whose connections end, with what was on its way"""
    stalls: int = 0
    """links over which nothing arrives, and nothing ends"""
    slow: int = 0
    """links that take up to a second for each message"""
    repeats: float = 0.0
    """how often a message that may come twice does"""
    within: int = 150
    """steps, the first of which a fault may follow"""
    spared: tuple[str, ...] = ()
    """workers that do not crash"""
    heal: bool = True
    """links are mended and workers restarted after a while; else never"""

    def total(self) -> int:
        """Faults that are timed."""
        return self.crashes + self.cuts + self.stalls + self.slow


@final
class Nemesis:
    """Injects the faults of one history, and knows whom they hit."""

    def __init__(self, world: World, faults: Faults, seed: int) -> None:
        self._world, self._faults = world, faults
        self._random = random.Random(f"faults {seed}")
        self.victims: set[str] = set()
        """workers that a fault has hit, themselves or by a link of theirs"""
        self.may_be_silent = False
        """whether there was a fault that only a deadline can notice"""
        self._is_over = False
        kinds: list[Callable[[], None]] = [
            *[self._crash] * faults.crashes,
            *[self._cut] * faults.cuts,
            *[self._stall] * faults.stalls,
            *[self._slow] * faults.slow,
        ]
        for act in map(self._unless_over, kinds):
            if self._random.random() < 0.5:
                world.at(BACKWARD, self._random.randint(1, max(2, faults.within // 5)), act)
            else:
                world.at(ANY, self._random.randint(1, faults.within), act)

    def end(self) -> None:
        """Mend everything, now; nothing more happens."""
        self._is_over = True
        self._world.spare()
        for link in list(self._world.network.links()):
            self._heal(link)
        if self._world.is_open:
            for name in self._world.names:
                self._restart(name)

    def stop(self) -> None:
        """Nothing more happens, and nothing is mended."""
        self._is_over = True
        self._world.spare()

    def has_stalled(self) -> bool:
        """Whether a link is stalled now."""
        return any(link.is_stalled for link in self._world.network.links())

    def _crash(self) -> None:
        world = self._world
        alive = [n for n in world.names if world.is_alive(n) and n not in self._faults.spared]
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
        if not world.lives[name].process.is_dead:
            return
        links = [world.network.link(name, other) for other in world.names if other != name]
        if any(link.is_cut or link.is_stalled for link in links):
            self._later(lambda: self._restart(name))  # it could not meet the others
            return
        world.fault("restart", name)
        world.begin_life(name)

    def _cut(self) -> None:
        link = self._some_link()
        self._world.fault("cut", link.name)
        self._world.network.cut(link, silent_for=self._random.choice((0.0, 0.0, 0.1)))
        self._heal_later(link)

    def _stall(self) -> None:
        link = self._some_link()
        self._world.fault("stall", link.name)
        self._world.network.stall(link)
        self._heal_later(link)

    def _slow(self) -> None:
        link = self._some_link()
        self._world.fault("slow", link.name)
        link.slowness = self._random.choice((10.0, 50.0, 300.0))
        self._heal_later(link)

    def _some_link(self) -> Link:
        a, b = self._random.sample(self._world.names, 2)
        self.victims |= {a, b}
        self.may_be_silent = True
        return self._world.network.link(a, b)

    def _heal_later(self, link: Link) -> None:
        if self._faults.heal:
            self._later(lambda: self._heal(link))

    def _heal(self, link: Link) -> None:
        if link.is_cut or link.is_stalled or link.slowness != 1.0:
            self._world.fault("heal", link.name)
            self._world.network.heal(link)

    def _later(self, act: Callable[[], None]) -> None:
        seconds = 0.005 * 1200 ** self._random.random()
        scheduler = self._world.scheduler
        scheduler.at(scheduler.now + seconds, self._unless_over(act))

    def _unless_over(self, act: Callable[[], None]) -> Callable[[], None]:
        """Also what was due before the end may come to pass only after it."""

        def unless_over() -> None:
            if not self._is_over:
                act()

        return unless_over
