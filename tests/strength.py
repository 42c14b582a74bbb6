"""How much of each random suite is played.

`make test` plays a small part of each with seeds of the day, so that every day tries something new.
`make long` (GRADWIRE_LONG=1) plays all of it, always the same seeds.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

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
