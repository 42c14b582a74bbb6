"""Many histories, one after the other or on several cores, and what they add up to."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from gradwire.testing.simulate.history import History, play, setting_of

_EFFECTS = ("lost frames", "late frames", "failed steps", "good steps")
_KINDS = {
    False: (
        "crash",
        "silent crash",
        "restart",
        "cut",
        "stall",
        "slow",
        "heal",
        "repeat",
        "lie",
        *_EFFECTS,
    ),
    True: ("crash", "silent crash", "cut", "stall", "slow", "repeat", "lie", *_EFFECTS),
}
"""Faults that a batch should have, and their effects, by whether faults never heal."""
_FREEZE_EVERY = 50
_SHARE = 25
"""How many seeds a process is given at a time."""


@dataclass(slots=True)
class Summary:
    """The histories of a batch, counted."""

    liveness: bool
    seeds: int = 0
    failed: list[History] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Summary) -> None:
        """Add another batch of the same kind."""
        self.seeds += other.seeds
        self.failed += other.failed
        self.counts += other.counts

    def missing(self) -> list[str]:
        """Faults, and what they must bring about, that no history of the batch had."""
        return [kind for kind in _KINDS[self.liveness] if not self.counts[kind]]

    def lines(self) -> list[str]:
        """As people read it."""
        mode = "liveness" if self.liveness else "safety"
        told = ", ".join(f"{self.counts[kind]} {kind}" for kind in _KINDS[self.liveness])
        return [f"{self.seeds} seeds ({mode}), {len(self.failed)} with violations", f"  {told}"]


def run(
    seeds: Iterable[int],
    *,
    liveness: bool = False,
    on_told: Callable[[History, Summary], bool] = lambda told, summary: True,
) -> Summary:
    """Play them all, or until `on_told` says False."""
    summary = Summary(liveness)
    try:
        for seed in seeds:
            if summary.seeds % _FREEZE_EVERY == 0:
                # What is there already need not be looked at after each history. Of a worker that
                # crashed its open futures stay: they are part of a cycle through C++, which ends
                # with their call.
                gc.collect()
                gc.freeze()
            told = play(setting_of(seed, liveness=liveness))
            summary.seeds += 1
            summary.counts += told.counts
            if told.violations:
                summary.failed.append(told)
            if not on_told(told, summary):
                break
    finally:
        gc.unfreeze()
    return summary


def run_on_cores(
    seeds: Sequence[int],
    jobs: int,
    *,
    liveness: bool = False,
    on_some: Callable[[Summary], bool] = lambda summary: True,
) -> Summary:
    """The same in so many processes; `on_some` is called now and then, in the order of the seeds.

    What has begun is played to its end when it says False.
    """
    summary = Summary(liveness)
    shares = [seeds[n : n + _SHARE] for n in range(0, len(seeds), _SHARE)]
    with ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        for played in pool.map(partial(run, liveness=liveness), shares):
            summary.add(played)
            if not on_some(summary):
                pool.shutdown(cancel_futures=True)
                break
    return summary
