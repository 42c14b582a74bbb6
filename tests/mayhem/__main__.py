"""A random hour: python -m tests.mayhem --minutes 60 --seed 1"""

from __future__ import annotations

import argparse
import sys
import time

from tests.mates import Gone, Hung, Raised
from tests.mayhem.hour import KINDS, Hour, Violation
from tests.progress import SECONDS, Progress


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mayhem")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of fault, with commas")
    asked = parser.parse_args()
    began, episodes = time.monotonic(), 0
    progress = Progress(asked.minutes * 60, SECONDS, failed="late")
    with Hour(asked.seed, asked.only.split(",")) as hour:
        try:
            with progress:
                while time.monotonic() - began < asked.minutes * 60:
                    hour.episode()
                    episodes += 1
                    progress.note(f"{episodes} episodes")
                    progress.reach(failed=len(hour.late))
            broken = [f"left behind: {hour.leftovers()}"] if hour.leftovers() else []
        except (Violation, Gone, Hung, Raised) as error:
            broken = [f"{type(error).__name__}: {error}"]
        broken += hour.late
        print(f"{episodes} episodes of {dict(hour.faults)}; endings {dict(hour.endings)}")
        for sample in hour.samples.values():
            print("such as:", sample)
        print(f"the slowest phase took {hour.slowest:.1f} s; seed {asked.seed}")
        for line in broken:
            print("broken:", line)
        if not broken:
            print(f"all held; at the end {hour.footprints()}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
