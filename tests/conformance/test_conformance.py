"""The part of torch's suites that is run with every change; `make conformance` runs all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import strength
from tests.conformance import plan
from tests.conformance.report import is_as_expected, line, reason, table
from tests.conformance.runner import Outcome, Verdict
from tests.conformance.suites import MODULES

ROOT = Path(__file__).parents[2]
SECONDS = 540
CASE = plan.Case("DistOptimizerTest", "test_dist_optim", "a")
PASSED = Outcome(CASE, Verdict.PASS, 1.25, "", "")
FAILED = Outcome(CASE, Verdict.FAIL, 1.25, "Traceback\n\nValueError: no\n", "")


SUITES_OF_TORCH = ["DistAutogradTest", "DistOptimizerTest", "RemoteModuleTest"]
"""The others, and all of these, are played by `make conformance`."""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(SECONDS + 10)
@pytest.mark.parametrize("suite", strength.part_of(SUITES_OF_TORCH, 3))
def test_a_suite_of_torch_passes(suite):
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance", "--class", suite, "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stderr + done.stdout


def test_every_test_belongs_to_a_suite_that_can_be_built():
    named = [*plan.cases(), *plan.cases(gpu=True)]
    assert {case.suite for case in named} == set(MODULES)


def test_no_test_is_named_twice():
    names = [str(case) for case in plan.cases()]

    assert len(names) == len(set(names)) == 386


def test_tests_are_chosen_by_suite_and_by_name():
    assert {case.suite for case in plan.cases(["DistOptimizerTest"])} == {"DistOptimizerTest"}
    assert plan.cases(tests=["DistOptimizerTest.test_dist_optim"]) == [CASE]
    with pytest.raises(LookupError, match="no suite is called Nowhere"):
        plan.cases(["Nowhere"])


@pytest.mark.parametrize("stock", [False, True])
def test_every_exclusion_has_a_reason(stock):
    assert all(plan.exclusions(stock).values())


def test_an_excluded_test_is_expected_to_fail():
    excluded = {str(CASE): "a reason"}

    assert is_as_expected(PASSED, {})
    assert not is_as_expected(FAILED, {})
    assert is_as_expected(FAILED, excluded)
    assert not is_as_expected(PASSED, excluded)


def test_a_report_says_what_failed_and_why():
    assert line(PASSED, {}) == "PASS      1.25 s  DistOptimizerTest.test_dist_optim"
    assert reason(FAILED) == "    Traceback\n    ValueError: no"
    assert table([PASSED, FAILED], {}).splitlines()[-1].split() == ["all", "1", "1", "0", "0", "0"]
