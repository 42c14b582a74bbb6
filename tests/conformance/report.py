"""What a run says: a line per test as it ends, the reasons of failures, a table, a verdict."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from tests.conformance.runner import Outcome, Verdict

_LINES = 14
"""Of a traceback that is quoted."""
_PREFIX = re.compile(r"^[A-Z]\d{4} [^\]]*\] ?", re.MULTILINE)
_MACHINERY = ("/multiprocessing/", "/unittest/", "threading.py", "tests/conformance/", "<frozen ")
"""Frames that say nothing about where a rank stands."""


def is_as_expected(outcome: Outcome, excluded: Mapping[str, str]) -> bool:
    """It passed, or it is excluded and did not."""
    return (outcome.verdict is Verdict.PASS) != (str(outcome.case) in excluded)


def line(outcome: Outcome, excluded: Mapping[str, str]) -> str:
    """One test that has just ended."""
    note = ""
    if str(outcome.case) in excluded:
        passed = outcome.verdict is Verdict.PASS
        note = "  (excluded, yet it passes)" if passed else "  (excluded)"
    return f"{outcome.verdict.upper():8}{outcome.seconds:6.2f} s  {outcome.case}{note}"


def reason(outcome: Outcome) -> str:
    """The last lines of the traceback; of a test that hung, where its ranks stood."""
    if outcome.verdict is Verdict.TIMEOUT:
        text, lines = _PREFIX.sub("", outcome.log), 4 * _LINES
    else:
        text, lines = outcome.error, _LINES
    kept = [part.rstrip() for part in text.splitlines() if part.strip()]
    telling = [part for part in kept if not any(word in part for word in _MACHINERY)]
    return "\n".join(f"    {part}" for part in telling[-lines:])


def table(outcomes: Sequence[Outcome], excluded: Mapping[str, str]) -> str:
    """The counts of each suite, and their sum."""
    suites: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        for suite in (outcome.case.suite, "all"):
            suites[suite][outcome.verdict] += 1
            suites[suite]["excluded"] += str(outcome.case) in excluded
    columns = [*Verdict, "excluded"]
    head = f"{'suite':34}" + "".join(f"{column:>9}" for column in columns)
    order = [*sorted(name for name in suites if name != "all"), "all"]
    rows = [f"{name:34}" + "".join(f"{suites[name][c]:9}" for c in columns) for name in order]
    return "\n".join([head, *rows])


def as_data(outcomes: Sequence[Outcome], excluded: Mapping[str, str]) -> list[dict[str, object]]:
    """The same for machines."""
    return [
        {
            "suite": outcome.case.suite,
            "test": outcome.case.test,
            "kind": outcome.case.kind,
            "verdict": str(outcome.verdict),
            "seconds": round(outcome.seconds, 3),
            "excluded": excluded.get(str(outcome.case)),
            "error": outcome.error,
        }
        for outcome in outcomes
    ]
