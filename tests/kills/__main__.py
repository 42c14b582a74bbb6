"""The kill loop by hand: python -m tests.kills --rounds 500 --seed 1"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice

from tests.kills.loop import PROMISED, Loop, Violation
from tests.mates import Gone, Hung, Raised
from tests.progress import Progress


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--listen", default="unix", help="unix, or tcp://127.0.0.1:0")
    asked = parser.parse_args()
    began, broken = time.monotonic(), 0
    progress = Progress(asked.rounds, "rounds", failed="broken")
    with Loop(asked.seed, asked.listen) as loop, progress:
        progress.say(f"{len(loop.points)} points; seed {asked.seed}")
        for number, death in enumerate(islice(loop.deaths(), asked.rounds), 1):
            progress.note(str(death))
            try:
                loop.round(death)
            except (Violation, Gone, Hung, Raised) as error:
                broken += 1
                progress.say(f"round {number}: {death}: {type(error).__name__}: {error}")
                loop.start_over()
            progress.reach(number, failed=broken)
            if time.monotonic() - began > asked.seconds:
                break
        tally = loop.tally
        progress.say(
            f"{tally.rounds} rounds held, {broken} did not; "
            f"{len(tally.points)} of {len(loop.points)} points; "
            f"{tally.survived} steps were over before the death, and exact; "
            f"errors {dict(tally.errors)}; slowest {tally.slowest:.2f} s, "
            f"{tally.late} over {PROMISED:g} s; at the end {loop.footprints()}"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
