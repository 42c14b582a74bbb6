"""Which locks of a worker its threads may not wait with. See docs/threads.md, Rules.

A thread that holds a lock may be interrupted by a finalizer or a signal handler of the user's that
makes a call. If it waited there, nobody could take the lock, and the answer might need it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import call
from typing import Any, Final, cast, final
from weakref import WeakSet

from gradwire.errors import UsageError
from gradwire.threads import mine
from gradwire.transport.forking import renew_after_fork

MAKE_IT_ELSEWHERE = "let it put a note into a queue.SimpleQueue, and make the call elsewhere"
"""What somebody can do whose finalizer was refused."""


_alive: WeakSet[Sections] = WeakSet()
_is_inside: tuple[Callable[[], bool], ...] = ()
"""For each lock of each worker of the process: a finalizer may be another worker's."""


@final
class Sections:
    """The locks of one worker."""

    def __init__(self, name: str, *locks: threading.RLock) -> None:
        self._name = name
        self._locks: list[threading.RLock] = [*locks]
        _alive.add(self)
        _look_at_all()

    def add(self, lock: threading.RLock) -> None:
        """This one, too."""
        self._locks.append(lock)
        _look_at_all()

    def forked(self) -> None:
        """In a forked process: threads that it does not have may have held them."""
        renew_after_fork(*self._locks)


def check_outside(what: str) -> None:
    """UsageError if the calling thread has a lock, or may not wait for another reason.

    hot: each request, and each wait that lasts
    """
    duty = mine.duty
    if duty is not None and not duty.may_wait:
        raise UsageError(
            f"{what} was asked for by a finalizer or a signal handler on a thread that others need",
            hint=MAKE_IT_ELSEWHERE,
        )
    if any(map(call, _is_inside)):  # without a step of the interpreter for each
        raise UsageError(
            f"{what} was asked for by a finalizer or a signal handler which interrupts "
            f"{_who_is_inside()} while it holds a lock",
            hint=MAKE_IT_ELSEWHERE,
        )


_of_python: Final = getattr(threading, "_active_limbo_lock", None)
"""What Python holds while it starts or ends a thread; no other thread can be started then, and to
wait may need one. It is private: where it is not there, or no RLock, such a wait is not refused."""


def _look_at_all() -> None:
    global _is_inside  # one slot, changed as a whole when a worker opens
    locks = [lock for each in list(_alive) for lock in each._locks]
    if _of_python is not None and hasattr(_of_python, "_is_owned"):
        locks.append(_of_python)
    _is_inside = tuple(cast(Any, lock)._is_owned for lock in locks)


def _who_is_inside() -> str:
    """The worker whose lock this thread has."""
    inside = (
        each._name
        for each in list(_alive)
        if any(cast(Any, lock)._is_owned() for lock in each._locks)
    )
    return next(inside, "Python")
