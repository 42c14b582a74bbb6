"""How much of each random suite is played.

`make test` plays a small part of each with seeds of the day, so that every day tries something new.
`make long` (GRADWIRE_LONG=1) plays all of it, always the same seeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TypeVar

T = TypeVar("T")

IS_LONG = os.environ.get("GRADWIRE_LONG") == "1"
_TODAY = datetime.now(UTC).toordinal()


def seeds(every: int, today: int) -> range:
    """The first `every` seeds in a long run, else so many of those that belong to today."""
    if IS_LONG:
        return range(every)
    first = 100_000 * _TODAY
    return range(first, first + today)


def count(every: int, today: int) -> int:
    """How often, or how long, something is done."""
    return every if IS_LONG else today


def part_of(cases: Iterable[T], parts: int) -> list[T]:
    """All of them in a long run, else one of so many parts, each day another."""
    all_cases = list(cases)
    return all_cases if IS_LONG else all_cases[_TODAY % parts :: parts]
