"""Which locks of a worker its threads may not wait with. See docs/threads.md, Rules.

A thread that holds a lock may be interrupted by a finalizer or a signal handler of the user's that
makes a call. If it waited there, nobody could take the lock, and the answer might need it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast, final

from gradwire.errors import UsageError
from gradwire.threads import mine
from gradwire.transport.forking import renew_after_fork

MAKE_IT_ELSEWHERE = "let it put a note into a queue.SimpleQueue, and make the call elsewhere"
"""What somebody can do whose finalizer was refused."""


@final
class Sections:
    """Those of one worker."""

    def __init__(self, name: str, *locks: threading.RLock) -> None:
        self._name = name
        self._locks: list[threading.RLock] = []
        self._is_inside: list[Callable[[], bool]] = []
        for lock in locks:
            self.add(lock)

    def add(self, lock: threading.RLock) -> None:
        """This one, too."""
        self._locks.append(lock)
        self._is_inside.append(cast(Any, lock)._is_owned)

    def forked(self) -> None:
        """In a forked process: threads that it does not have may have held them."""
        renew_after_fork(*self._locks)

    def check_outside(self, what: str) -> None:
        """UsageError if the calling thread has one of them, or may not wait for another reason.

        hot: each request and each wait
        """
        duty = mine.duty
        if duty is not None and not duty.may_wait:
            raise UsageError(
                f"{what} was asked for by a finalizer or a signal handler on a thread of "
                f"{self._name} that others need",
                hint=MAKE_IT_ELSEWHERE,
            )
        for is_inside in self._is_inside:
            if is_inside():
                raise UsageError(
                    f"{what} was asked for by a finalizer or a signal handler which interrupts "
                    f"{self._name} while it holds a lock",
                    hint=MAKE_IT_ELSEWHERE,
                )
