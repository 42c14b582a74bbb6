"""Alternating rounds of both sides, and their statistics: medians, percentiles, ratio."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from benchmarks.api import GRADWIRE, SIDES, TORCH
from benchmarks.sides import World

Samples = dict[str, list[list[float]]]
"""The samples of each round, by side."""


def timed(step: Callable[[], object], seconds: float) -> list[float]:
    """Repeat `step` for about so many seconds, at least once; the seconds of each run."""
    samples = []
    begin = perf_counter()
    end = begin + seconds
    while True:
        step()
        now = perf_counter()
        samples.append(now - begin)
        if now >= end:
            return samples
        begin = now


@dataclass(frozen=True)
class Summary:
    """One side of a row."""

    median: float
    low: float
    """the 10th percentile"""
    high: float
    """the 90th percentile"""
    count: int
    rounds: list[float]
    """the median of each round"""


def summary_of(rounds: list[list[float]]) -> Summary:
    """The summary of the samples of all rounds."""
    pooled = sorted(value for samples in rounds for value in samples)
    return Summary(
        median=statistics.median(pooled),
        low=percentile(pooled, 10),
        high=percentile(pooled, 90),
        count=len(pooled),
        rounds=[statistics.median(samples) for samples in rounds],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile, interpolated between the two nearest samples."""
    at = (len(ordered) - 1) * percent / 100
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    question: str
    measure: str
    unit: str
    """s, MiB, or the name of what is counted"""
    sides: dict[str, Summary]
    more_is_better: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better gradwire is: below 1, it is worse."""
        if not {TORCH, GRADWIRE} <= self.sides.keys():
            return None
        torch, gradwire = self.sides[TORCH].median, self.sides[GRADWIRE].median
        over, under = (gradwire, torch) if self.more_is_better else (torch, gradwire)
        return over / under if under else None


def row(question: str, measure: str, samples: Samples, unit: str = "s", **more: Any) -> Row:
    """A row from the samples that `Run.compare` returned."""
    sides = {side: summary_of(rounds) for side, rounds in samples.items()}
    return Row(question, measure, unit, sides, **more)


@dataclass
class Run:
    """How much is measured, and the worlds that are running."""

    rounds: int = 7
    seconds: float = 0.5
    """of one block"""
    tiny: bool = False
    """the smallest parameters of every question; worlds may have more workers than needed"""
    sides: Sequence[str] = SIDES
    modules: Sequence[str] = ()
    peers: bool = False
    say: Callable[[str], None] = lambda what: None
    """what is being measured"""
    _open: dict[tuple[int, bool], list[World]] = field(default_factory=dict)

    def sizes(self, *all_of_them: int, tiny: int | None = None) -> list[int]:
        """The parameters to measure with; one alone, the first unless said, in a tiny run."""
        if not self.tiny:
            return list(all_of_them)
        return [all_of_them[0] if tiny is None else tiny]

    def worlds(self, size: int, *, tcp: bool = False) -> list[World]:
        """One world of each side with so many workers; other questions reuse them."""
        roomy = [key for key in self._open if self.tiny and key[0] >= size and key[1] == tcp]
        key = roomy[0] if roomy else (size, tcp)
        if key not in self._open:
            self.say(f"starting {size} workers of each side{' over TCP' if tcp else ''}")
            self._open[key] = [self.fresh(side, size, tcp=tcp) for side in self.sides]
        return self._open[key]

    def fresh(self, side: str, size: int, **settings: bool) -> World:
        """A new world; the caller closes it."""
        return World(side, size, exposed=self.modules, **settings)

    def compare(
        self, worlds: list[World], block: Callable[..., list[float]], *args: Any
    ) -> Samples:
        """Run `block` on w0 of each world in alternating rounds; the first is a warm-up."""
        self.say(f"{block.__module__.rpartition('.')[2]}{args}")
        samples: Samples = {world.side: [] for world in worlds}
        for n in range(self.rounds + 1):
            for world in worlds:
                found = world.run(block, *args)
                if n > 0:
                    samples[world.side].append(found)
        return samples

    @contextmanager
    def alone(self, side: str, size: int) -> Iterator[World]:
        """A new world of one side, for questions about the whole process."""
        if self.tiny:
            yield self.worlds(size)[list(self.sides).index(side)]
            return
        self.say(f"starting {size} workers of {side}")
        with self.fresh(side, size) as world:
            yield world

    def close(self) -> None:
        """End every world."""
        for worlds in self._open.values():
            for world in worlds:
                world.close()
        self._open.clear()

    def keep(self, *sizes: int) -> None:
        """End all worlds except those of these sizes."""
        if self.tiny:
            return
        for key in [key for key in self._open if key[0] not in sizes]:
            for world in self._open.pop(key):
                world.close()
