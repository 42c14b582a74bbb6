"""python -m tests.soak --minutes 30 --seed 1 --every 20"""

from __future__ import annotations

import argparse
import os
import sys

from tests.soak.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills, about")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = soak(60 * asked.minutes, asked.seed, asked.every, lambda line: print(line, flush=True))
    print(report)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
