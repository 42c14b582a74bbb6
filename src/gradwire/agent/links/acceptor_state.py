"""Connections whose peer has not shown yet who it is: how many, and which has to go.

Pure; time is an argument. There is room for a number of them. When it is full, who comes next waits
until one of them is through, or the oldest has had its fair time; then that one has to go. So a
crowd that says nothing delays a worker by little, and a crowd of workers is let in one by one.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class PendingHandshakes(Generic[T]):
    """In the order in which they came."""

    def __init__(self, most: int, fair_seconds: float) -> None:
        self._most, self._fair_seconds = most, fair_seconds
        self._since: dict[T, float] = {}

    def has(self, who: T) -> bool:
        """Whether it stands there."""
        return who in self._since

    @property
    def has_room(self) -> bool:
        """Whether one more may come."""
        return len(self._since) < self._most

    def came(self, who: T, now: float) -> None:
        """One more."""
        self._since[who] = now

    def gone(self, who: T) -> None:
        """It has shown who it is, or was refused; also if that is known already."""
        self._since.pop(who, None)

    def next_due(self) -> float:
        """When the oldest has had its time."""
        return min(self._since.values(), default=math.inf) + self._fair_seconds

    def maybe_overdue(self, now: float) -> T | None:
        """Who has to go, if anybody has and its place is needed."""
        if self.has_room or now < self.next_due():
            return None
        return next(iter(self._since))
