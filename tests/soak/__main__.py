"""python -m tests.soak --minutes 30 --seed 1 --every 20"""

from __future__ import annotations

import argparse
import os
import sys

from tests.progress import SECONDS, Progress
from tests.soak.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills, about")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds = 60 * asked.minutes
    with Progress(seconds, SECONDS) as progress:

        def told(line: str) -> None:
            progress.note(line)
            progress.reach()

        report = soak(seconds, asked.seed, asked.every, told)
    print(report)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
