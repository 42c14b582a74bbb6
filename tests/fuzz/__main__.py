"""python -m tests.fuzz --target payload --seconds 600 --seed 1 [--plain]

Guided by coverage where atheris is installed (`pip install atheris`), else, or with --plain, by our
own mutator. Ends with status 1 at the first defect, and shows the input.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

NAMES = ("frame", "handshake", "message", "payload", "tensors", "world")


def main() -> None:
    """One campaign for each target named."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=[*NAMES, "all"], default="all")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    asked = parser.parse_args()
    if asked.target != "all" and not asked.plain and importlib.util.find_spec("atheris"):
        guided(asked.target, asked.seconds, asked.seed)
        return
    from tests.fuzz.run import campaign

    for name in NAMES if asked.target == "all" else (asked.target,):
        print(campaign(name, asked.seed, seconds=asked.seconds), flush=True)


def guided(name: str, seconds: float, seed: int) -> None:
    """Hand the target to libFuzzer, with our mutator beside its own."""
    import atheris

    with atheris.instrument_imports(include=["gradwire"]):
        from tests.fuzz.mutate import Mutator
        from tests.fuzz.run import MOST_GROWTH, feed, resident
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    seeds = target.seeds()
    mutator = Mutator(seed, seeds)
    counted = {"executions": 0, "start": 0, "grown": 0}

    def mutate(data: bytes, most: int, number: int) -> bytes:
        changed = mutator.changed(data) if number % 2 else atheris.Mutate(data, most)
        return changed[:most]

    with target.open() as run, tempfile.TemporaryDirectory() as corpus:
        for n, one in enumerate(seeds):
            Path(corpus, f"seed-{n}").write_bytes(one)

        def once(data: bytes) -> None:
            feed(target, run, data)
            counted["executions"] += 1
            if counted["executions"] == 20_000:
                counted["start"] = resident()
            if counted["start"] and counted["executions"] % 1000 == 0:
                counted["grown"] = max(counted["grown"], resident() - counted["start"])
                assert counted["grown"] < MOST_GROWTH, counted

        arguments = [
            f"-max_total_time={int(seconds)}", f"-seed={seed}", "-max_len=32768", "-timeout=20",
            "-rss_limit_mb=4096", "-print_final_stats=1", "-verbosity=1", corpus,
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *arguments], once, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
