"""A storm of some length: python -m tests.storm --seconds 2000 --seed 1"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.progress import SECONDS, Progress
from tests.storm.hazards import KINDS
from tests.storm.storm import Storm, Violation

EPISODES = 20
"""of one world"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first world; the next has one more"
    )
    parser.add_argument("--episode", type=float, default=2.0, help="seconds of one")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of hazards, with commas")
    parser.add_argument("--keep-going", action="store_true", help="a new world after a violation")
    asked = parser.parse_args()
    # Where there is a GPU, torch's first backward wakes CUDA's driver, which keeps handles open and
    # holds up the end of each forked process for seconds: so the workers see none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    began, seed, done, broken = time.monotonic(), asked.seed, Counter(), 0

    def is_over() -> bool:
        return time.monotonic() - began > asked.seconds

    with Progress(asked.seconds, SECONDS, failed="broken") as progress:
        while not is_over() and (not broken or asked.keep_going):
            try:
                with Storm(seed, asked.only.split(",")) as storm:
                    for number in range(EPISODES):
                        if is_over():
                            break
                        where = f"world {seed}, episode {number}"
                        kinds = storm.episode(asked.episode)
                        progress.note(f"{where}: {', '.join(kinds)}")
                        progress.reach(failed=broken)
                    where = f"world {seed}, its end"
                    storm.end()
            except Violation as error:
                broken += 1
                progress.say(f"broken: --seed {seed} ({where}): {error}")
            done += storm.done
            seed += 1
    print(f"{seed - asked.seed} worlds, {dict(done)}")
    print(f"{broken} broken" if broken else "all held")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
