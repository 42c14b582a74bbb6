"""On a GPU, over worker processes: python -m tests.streams --programs 2000"""

from __future__ import annotations

import argparse
import random
import sys
import time

import torch

import gradwire as gw
from tests.streams import program

DEVICE = "cuda:0"
_LONGEST_CYCLES = 4_000_000
"""of the GPU: some milliseconds"""


class Cuda:
    """The first CUDA device of this process."""

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """A copy there."""
        return values.to(DEVICE)

    def new_stream(self) -> torch.cuda.Stream:
        """A side stream."""
        return torch.cuda.Stream(DEVICE)

    def current_stream(self) -> torch.cuda.Stream:
        """The one on which this thread queues work."""
        return torch.cuda.current_stream(DEVICE)

    def use_stream(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        """Make it current."""
        return torch.cuda.stream(stream)

    def delay(self, dice: random.Random) -> None:
        """Let the current stream be late, sometimes."""
        if dice.random() < 0.5:
            torch.cuda._sleep(dice.randrange(_LONGEST_CYCLES))


def play(first: int, programs: int, workers: int) -> list[str]:
    """The programs that differ, in words."""
    kit, others = Cuda(), [f"w{n}" for n in range(1, workers)]
    wrong, said = [], time.monotonic()
    for seed in range(first, first + programs):
        try:
            program.Program(seed, kit, others).run()
        except Exception as error:
            wrong.append(f"{seed}: {type(error).__name__}: {error}")
        if time.monotonic() > said + 10:
            said = time.monotonic()
            print(f"{seed + 1 - first} programs, {len(wrong)} differ", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.streams")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    asked = parser.parse_args()
    began, args = time.monotonic(), (asked.first, asked.programs, asked.workers)
    wrong = gw.run(play, asked.workers, args=args, expose=program.EXPOSED)
    seconds = time.monotonic() - began
    print(f"{asked.programs} programs on {asked.workers} processes, {seconds:.0f} s")
    print("\n".join(wrong) or "all as on the CPU")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
