"""Which tests are run, and which of them are known not to pass.

`tests.tsv` names every test that needs neither CUDA nor TorchScript, and that torch does not skip
itself: kind `a` uses the public interface only, kind `b` also private names that a successor can
offer.
`tests_gpu.tsv` names those that need one GPU.
`exclusions.txt` has one line per test that fails for a reason we stand by, `exclusions_stock.txt`
one for each that fails with torch's own RPC because TorchScript is off.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One test method of one suite."""

    suite: str
    test: str
    kind: str

    def __str__(self) -> str:
        return f"{self.suite}.{self.test}"


def cases(
    suites: Sequence[str] = (), tests: Sequence[str] = (), *, gpu: bool = False
) -> list[Case]:
    """All of them, or those of the suites and of the tests named; with `gpu`, those for one GPU."""
    with open(HERE / f"tests{'_gpu' * gpu}.tsv", encoding="utf-8", newline="") as file:
        known = [
            Case(row["class"], row["test"], row["kind"])
            for row in csv.DictReader(file, delimiter="\t")
        ]
    for name in suites:
        if name not in {case.suite for case in known}:
            raise LookupError(f"no suite is called {name}")
    for name in tests:
        if not any(name in (case.test, str(case)) for case in known):
            raise LookupError(f"no test is called {name}")
    return [
        case
        for case in known
        if (not suites or case.suite in suites)
        and (not tests or case.test in tests or str(case) in tests)
    ]


def exclusions(stock: bool = False) -> dict[str, str]:
    """The reason for each test that is known not to pass, by `Suite.test`."""
    path = HERE / ("exclusions_stock.txt" if stock else "exclusions.txt")
    known = {str(case) for gpu in (False, True) for case in cases(gpu=gpu)}
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.partition(" ")
            if name not in known or not reason.strip():
                raise ValueError(f"{path.name}: not a known test and a reason: {line!r}")
            found[name] = reason.strip()
    return found
