"""The calls of one actor that wait for their turn. Pure."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class MailboxState(Generic[T]):
    """Calls in order of arrival, of which at most so many run at a time."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._running, self._most = 0, 1

    def arrived(self, call: T, most: int) -> None:
        """A call has arrived; so many may run at a time."""
        self._waiting.append(call)
        self._most = most

    def maybe_next(self) -> T | None:
        """The call that begins now; None if enough of them run, or none waits."""
        if not self._waiting or self._running >= self._most:
            return None
        self._running += 1
        return self._waiting.popleft()

    def ended(self) -> bool:
        """A call that had begun is over; whether others wait."""
        self._running -= 1
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._waiting and not self._running
