"""python -m gradwire.testing.simulate: play seeds, print what a seed stands for and what failed."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from gradwire.testing.simulate.batch import Summary, run, run_on_cores
from gradwire.testing.simulate.history import History

_MOST_SHOWN = 5
_TELL_SECONDS = 5.0


def main() -> int:
    """0 if nothing was violated."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    began = told_at = time.monotonic()

    def goes_on(summary: Summary) -> bool:
        """Report progress now and then; False once there is enough to look at."""
        nonlocal told_at
        now, failed = time.monotonic(), len(summary.failed)
        if now - told_at > _TELL_SECONDS:
            told_at = now
            far = f"{summary.seeds} of {options.seeds} seeds, {summary.seeds / (now - began):.0f}/s"
            print(f"{far}, {failed} with violations", file=sys.stderr, flush=True)
        return failed < _MOST_SHOWN

    def on_told(told: History, summary: Summary) -> bool:
        if options.trace or options.seeds == 1 or told.violations:
            _show(told, trace=options.trace or bool(told.violations))
        return goes_on(summary)

    seeds = range(options.seed, options.seed + options.seeds)
    if options.jobs == 1 or options.trace:
        summary = run(seeds, liveness=options.liveness, on_told=on_told)
    else:
        summary = run_on_cores(seeds, options.jobs, liveness=options.liveness, on_some=goes_on)
        for told in summary.failed[:_MOST_SHOWN]:
            _show(told, trace=True)
    print("\n".join(summary.lines()))
    again = " --liveness" if options.liveness else ""
    for told in summary.failed:
        seed = told.setting.seed
        print(f"again: python -m gradwire.testing.simulate --seed {seed}{again}")
    return 1 if summary.failed else 0


def _show(told: History, *, trace: bool) -> None:
    print("\n".join(told.setting.lines()))
    if trace:
        print("\n".join(told.trace))
    for violation in told.violations:
        print(f"VIOLATED {violation}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.testing.simulate", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="in so many processes")
    parser.add_argument("--liveness", action="store_true", help="faults never heal")
    parser.add_argument("--trace", action="store_true", help="print what happened in any case")
    return parser


if __name__ == "__main__":
    sys.exit(main())
