"""On a GPU: python -m tests.block_kills --rounds 25"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.block_kills.loop import NAMES, Loop, Violation
from tests.mates import Gone, Hung, Raised


def drawn(deaths, rounds, dice):
    """So many deaths of each worker, in a random order."""
    chosen = []
    for name in NAMES:
        own = [death for death in deaths if death.victim == name]
        while rounds > len(own):
            own += own
        chosen += dice.sample(own, rounds)
    dice.shuffle(chosen)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.block_kills")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or pretend:0")
    parser.add_argument("--rounds", type=int, default=25, help="for each of the two workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    asked = parser.parse_args()
    began, broken, held = time.monotonic(), 0, 0
    with Loop(asked.device) as loop:
        print(f"{len(loop.deaths)} states", flush=True)
        for death in drawn(loop.deaths, asked.rounds, random.Random(asked.seed)):
            if time.monotonic() - began > asked.seconds:
                break
            try:
                loop.round(death)
                held += 1
            except (Violation, Gone, Hung, Raised) as error:
                broken += 1
                print(f"{death}: {type(error).__name__}: {error}", flush=True)
                loop.start_over()
        seconds = time.monotonic() - began
        print(
            f"{held} rounds held, {broken} did not; slowest {loop.slowest:.2f} s; {seconds:.0f} s"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
