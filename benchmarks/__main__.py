"""`python -m benchmarks`: run all benchmarks, or some with `--only noop,echo`; print a table."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Row, Run
from benchmarks.report import dated_file, facts, save, table
from tests.progress import Progress

QUESTIONS = [
    "noop",
    "echo",
    "protected",
    "inflight",
    "bursts",
    "references",
    "nested",
    "hops",
    "tracing",
    "pauses",
    "bare",
    "fan_out",
    "pipeline",
    "parameter_server",
    "optimizer",
    "two_trainers",
    "edges",
    "big_graph",
    "cuda",
    "startup",
    "importing",
    "memory",
    "flood",
]
"""In the order of the table: from one call to a training step, then the cost of a worker."""


def ask(question: str, run: Run) -> Iterator[Row]:
    """The rows of one question."""
    yield from importlib.import_module(f"benchmarks.{question}").rows(run)


def make_run(*, quick: bool = False, rounds: int | None = None, peers: bool = False) -> Run:
    """A Run with the number and length of rounds that the command asks for."""
    modules = [f"benchmarks.{question}" for question in QUESTIONS if question != "two_trainers"]
    run = Run(modules=modules, peers=peers)
    if quick:
        run.rounds, run.seconds = 3, 0.1
    if rounds is not None:
        run.rounds = rounds
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks, print the table and store it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", help=f"some of {', '.join(QUESTIONS)}")
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument("--rounds", type=int, help="rounds of each side, after one to warm up")
    parser.add_argument("--peers", action="store_true", help="other libraries too, if installed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",") if options.only else QUESTIONS
    if unknown := set(wanted) - set(QUESTIONS):
        parser.error(f"no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    run = make_run(quick=options.quick, rounds=options.rounds, peers=options.peers)
    known = facts(run, arguments)
    rows: list[Row] = []
    with Progress(len(wanted), "questions") as progress:
        run.say = progress.note
        try:
            for question in wanted:
                rows += ask(question, run)
                progress.advance()
        finally:
            run.close()
    print(table(rows, known))
    is_whole = not options.only and not options.quick
    where = options.json or (dated_file(known) if is_whole else None)
    if where is not None:
        save(where, rows, known)
        print(f"\nstored in {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
