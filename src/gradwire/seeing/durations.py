"""Histograms of how long calls, passes and steps took. Pure: seconds come from outside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, final

CALL_BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""of the buckets, in seconds: a small call on one machine takes 20 µs, a step may take minutes"""
MOST_FUNCTIONS = 50
"""Functions with a histogram of their own: the first that are called. OTHER has the rest."""
OTHER = "other"


class Buckets(NamedTuple):
    """What a histogram has counted: cumulated counts by their upper bound, and the sum."""

    counts: list[tuple[float, int]]
    total: float


@final
class Histogram:
    """Counts durations by size. Any thread may observe: no other runs within one addition."""

    def __init__(self, bounds: Sequence[float] = CALL_BOUNDS) -> None:
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        bucket = bisect_left(self._bounds, seconds)
        self._counts[bucket] += 1
        self._total += seconds

    def seen(self) -> Buckets:
        """What was counted until now."""
        total, counts = self._total, self._counts.copy()
        return Buckets([*zip(self._bounds, accumulate(counts), strict=True)], total)


@final
class Durations:
    """The histograms of one worker."""

    def __init__(self) -> None:
        self.passes, self.steps = Histogram(), Histogram()
        self._calls: dict[str, Histogram] = {}
        self._others = Histogram()

    def call_took(self, function: str, seconds: float) -> None:
        """A call has ended, in any way."""
        histogram = self._calls.get(function)
        if histogram is None:
            histogram = self._others
            if len(self._calls) < MOST_FUNCTIONS:
                histogram = self._calls.setdefault(function, Histogram())
        histogram.observe(seconds)

    def calls(self) -> dict[str, Buckets]:
        """The histograms of calls by function."""
        seen = {function: each.seen() for function, each in self._calls.copy().items()}
        others = self._others.seen()
        if others.counts[-1][1]:
            seen[OTHER] = others
        return seen
