"""`python -m tests.conformance`: torch's own suites for distributed RPC, against gradwire.

Exit code 1 if a test fails that is not excluded, or if an excluded one passes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conformance import plan, report
from tests.conformance.runner import Outcome, be, run_all
from tests.conformance.suites import load, set_environment
from tests.progress import Progress


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--class", dest="suites", action="append", default=[], metavar="SUITE")
    parser.add_argument("--test", dest="tests", action="append", default=[], metavar="TEST")
    parser.add_argument("--gpu", action="store_true", help="the tests that need one GPU")
    parser.add_argument("--be", nargs=2, default=[], help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help="torch's own RPC, to check the runner")
    parser.add_argument("--list", action="store_true", help="name the tests, and run nothing")
    parser.add_argument("--json", action="store_true", help="results on stdout as JSON")
    parser.add_argument("--quiet", action="store_true", help="no line for what is as expected")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--limit", type=int, default=60, help="seconds for one test")
    return parser.parse_args()


def main() -> int:
    """Run what was asked for; 1 if it does not go as expected."""
    options = arguments()
    if options.be:
        name, place = options.be
        be(name, Path(place))
    chosen = plan.cases(options.suites, options.tests, gpu=options.gpu)
    if options.list:
        print("\n".join(f"{case.kind}  {case}" for case in chosen))
        return 0
    excluded = plan.exclusions(options.stock)
    set_environment(options.limit, gpu=options.gpu)
    if not options.gpu:
        load(options.stock)
    outcomes = []
    with Progress(len(chosen), "tests", failed="not as expected") as progress:
        for outcome in run_all(chosen, options.jobs, options.limit, gpu=options.gpu):
            outcomes.append(outcome)
            tell(progress, outcome, excluded, options.quiet)
    return conclude(outcomes, excluded, options.json)


def tell(progress: Progress, outcome: Outcome, excluded: Mapping[str, str], quiet: bool) -> None:
    """What became of a test, on stderr, with the reason of what is not as expected."""
    expected = report.is_as_expected(outcome, excluded)
    if not (quiet and expected):
        progress.say(report.line(outcome, excluded), sys.stderr)
    if not expected:
        progress.say(report.reason(outcome), sys.stderr)
    progress.advance(failed=not expected)


def conclude(outcomes: Sequence[Outcome], excluded: Mapping[str, str], as_json: bool) -> int:
    """The table, and the exit code."""
    if as_json:
        print(json.dumps(report.as_data(outcomes, excluded), indent=1))
    else:
        print(report.table(outcomes, excluded))
    return 0 if all(report.is_as_expected(o, excluded) for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
