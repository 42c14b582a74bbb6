"""On a GPU, over worker processes: python -m tests.streams --programs 2000"""

from __future__ import annotations

import argparse
import sys
import time

import gradwire as gw
from tests.streams import on_cuda, program


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.streams")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    asked = parser.parse_args()
    began, args = time.monotonic(), (asked.first, asked.programs, asked.workers)
    wrong = gw.run(on_cuda.play, asked.workers, args=args, expose=program.EXPOSED)
    seconds = time.monotonic() - began
    print(f"{asked.programs} programs on {asked.workers} processes, {seconds:.0f} s")
    print("\n".join(wrong) or "all as on the CPU")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
