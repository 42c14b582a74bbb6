"""The programs on the first CUDA device. Not in __main__: worker processes import it."""

from __future__ import annotations

import random
import time

import torch

from tests.streams import program

DEVICE = "cuda:0"


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
            torch.cuda._sleep(dice.randrange(program.LONGEST_CYCLES))


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
