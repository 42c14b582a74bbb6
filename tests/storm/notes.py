"""What a worker of a storm has done, and what was wrong.

Without locks: it is written to by finalizers and signal handlers, in the middle of anything.
"""

from __future__ import annotations

from collections import Counter, deque


class Notes:
    """One for each process."""

    def __init__(self) -> None:
        self._done: deque[str] = deque()
        self._wrong: deque[str] = deque()

    def done(self, what: str) -> None:
        self._done.append(what)

    def wrong(self, what: str) -> None:
        self._wrong.append(what)

    @property
    def is_wrong(self) -> bool:
        return bool(self._wrong)

    def taken(self) -> dict:
        """All of it, and begin anew."""
        done, wrong = _emptied(self._done), _emptied(self._wrong)
        return {"done": dict(Counter(done)), "wrong": wrong}


def _emptied(queue: deque[str]) -> list[str]:
    return [queue.popleft() for _ in range(len(queue))]


NOTES = Notes()
