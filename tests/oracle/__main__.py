"""`python -m tests.oracle --programs 20000`: the long run, with its progress."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter

import torch

from gradwire.rpc.manner import Manner
from gradwire.testing import cluster
from tests.oracle.check import Checker, exposed
from tests.oracle.programs import FEATURES

_STANDS_STILL = 120.0
"""Seconds after which a program that does not end is a failure: the stacks of all threads."""


def main() -> int:
    """Run the programs; the number that differed, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--together", action="store_true", help="one edge for each message")
    options = parser.parse_args()
    manner = Manner(edge_per_message=options.together)
    torch.set_num_threads(1)
    began, failures, features = time.monotonic(), [], Counter()
    with cluster(5, expose=exposed(), manner=manner) as workers:
        checker = Checker(workers[0].run, together=options.together)
        for n, seed in enumerate(range(options.first, options.first + options.programs), 1):
            faulthandler.dump_traceback_later(_STANDS_STILL, exit=True)
            failure = checker.failure(seed)
            if failure is not None:
                failures.append(failure)
                print(failure, flush=True)
            if n % 500 == 0:
                rate = n / (time.monotonic() - began)
                print(f"{n} programs, {len(failures)} differ, {rate:.0f} a second", flush=True)
        faulthandler.cancel_dump_traceback_later()
        features = checker.features
    for feature in FEATURES:
        print(f"{features[feature]:8d}  {feature}")
    print(f"{options.programs - len(failures)} of {options.programs} programs as in one process")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
