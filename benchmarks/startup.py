"""How long until all workers have joined, and until a killed one serves again?

Each side is started as its users do it: gradwire by `gradwire.run`, the other by a spawned process
for each worker. The program that starts them has imported the library before.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from benchmarks.api import GRADWIRE, load, secret_beside
from benchmarks.measure import Row, Run, Samples, row
from benchmarks.sides import SECONDS

_KILLS = 5


def rows(run: Run) -> Iterator[Row]:
    """The start of 2, 8 and 16 workers; of it, the time from all imported to all joined."""
    for size in run.sizes(2, 8, 16, tiny=1):
        whole: Samples = {side: [] for side in run.sides}
        joining: Samples = {side: [] for side in run.sides}
        for _ in range(min(run.rounds, 5)):
            for side in run.sides:
                whole[side].append([seconds_to_join(side, size)])
                with run.fresh(side, size) as world:
                    joining[side].append([world.joining])
        yield row("startup", f"{size} workers, begun to joined", whole)
        yield row("startup", f"{size} workers joining, all imported", joining)
    if GRADWIRE in run.sides:  # the other cannot restart a worker
        yield row("startup", "killed, until it serves again", {GRADWIRE: [seconds_to_restart()]})


def seconds_to_join(side: str, size: int) -> float:
    """From the start of the first process until w0 has joined, which waits for all."""
    if side == GRADWIRE:
        import gradwire

        begin = monotonic()
        return gradwire.run(monotonic, size) - begin
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, ours:
        place = str(Path(directory) / "place")
        secret_beside(place).write_text(secrets.token_hex(32), encoding="ascii")
        begin = monotonic()
        started = []
        for rank in range(size):
            started.append(spawn.Process(target=_join, args=(theirs, side, rank, size, place)))
            started[-1].start()
        theirs.close()
        end = ours.recv()
        for process in started:
            process.join(SECONDS)
            process.kill()
    return end - begin


def _join(pipe, side: str, rank: int, size: int, place: str) -> None:
    warnings.simplefilter("ignore")  # torch warns of its own
    api = load(side)
    api.begin(rank, size, place, tcp=False, exposed=[])
    if rank == 0:
        pipe.send(monotonic())
    api.end()


def seconds_to_restart() -> list[float]:
    """Each from the death of a worker's process to the first answer of the next incarnation."""
    import gradwire

    return gradwire.run(_kill_again_and_again, 2, restarts=_KILLS, expose=[os.getpid])


def _kill_again_and_again() -> list[float]:
    import gradwire

    found = []
    for _ in range(_KILLS):
        pid = gradwire.rpc_sync("w1", os.getpid)
        begin = monotonic()
        os.kill(pid, signal.SIGKILL)
        for attempt in gradwire.retrying(times=100, wait=SECONDS):
            with attempt:
                gradwire.rpc_sync("w1", os.getpid)
        found.append(monotonic() - begin)
    return found


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--only", "startup", *sys.argv[1:]])
