"""Play many histories, print what a seed stands for, what failed, and what they add up to."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.progress import Progress
from tests.simulate.history import History, play, setting_of

_FAULTS = ("crash", "silent crash", "restart", "cut", "stall", "slow", "heal", "repeat", "lie")
_EFFECTS = ("lost frames", "late frames", "failed steps", "good steps")
_MOST_SHOWN = 5
_FREEZE_EVERY = 50
_SHARE = 25  # how many seeds a process is given at a time


@dataclass(slots=True)
class Summary:
    """The histories of a batch, counted."""

    liveness: bool
    seeds: int = 0
    failed: list[History] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def kinds(self) -> list[str]:
        """Faults that the batch should have, and what they must bring about."""
        never = ("restart", "heal") if self.liveness else ()
        return [kind for kind in (*_FAULTS, *_EFFECTS) if kind not in never]

    def add(self, other: Summary) -> None:
        """Add another batch of the same kind."""
        self.seeds += other.seeds
        self.failed += other.failed
        self.counts += other.counts

    def missing(self) -> list[str]:
        """Those that no history of the batch had."""
        return [kind for kind in self.kinds() if not self.counts[kind]]

    def lines(self) -> list[str]:
        """As people read it."""
        mode = "liveness" if self.liveness else "safety"
        told = ", ".join(f"{self.counts[kind]} {kind}" for kind in self.kinds())
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
            summary.add(Summary(liveness, 1, [told] if told.violations else [], told.counts))
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


# -- the command


def main() -> int:
    """0 if nothing was violated."""
    parser = argparse.ArgumentParser("python -m tests.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="in so many processes")
    parser.add_argument("--liveness", action="store_true", help="faults never heal")
    parser.add_argument("--trace", action="store_true", help="print what happened in any case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    progress = Progress(options.seeds, "seeds", failed="with violations")

    def goes_on(summary: Summary) -> bool:
        """Show how far it is; False once there is enough to look at."""
        progress.reach(summary.seeds, failed=len(summary.failed))
        return len(summary.failed) < _MOST_SHOWN

    def on_told(told: History, summary: Summary) -> bool:
        if options.trace or options.seeds == 1 or told.violations:
            progress.say(_text(told, trace=options.trace))
        return goes_on(summary)

    seeds = range(options.seed, options.seed + options.seeds)
    with progress:
        if options.jobs == 1 or options.trace:
            summary = run(seeds, liveness=options.liveness, on_told=on_told)
        else:
            summary = run_on_cores(seeds, options.jobs, liveness=options.liveness, on_some=goes_on)
            for told in summary.failed[:_MOST_SHOWN]:
                progress.say(_text(told))
    print("\n".join(summary.lines()))
    again = " --liveness" if options.liveness else ""
    for told in summary.failed:
        seed = told.setting.seed
        print(f"again: python -m tests.simulate --seed {seed}{again}")
    return 1 if summary.failed else 0


def _text(told: History, *, trace: bool = False) -> str:
    happened = told.trace if trace or told.violations else []
    violated = [f"VIOLATED {violation}" for violation in told.violations]
    return "\n".join([*told.setting.lines(), *happened, *violated])
