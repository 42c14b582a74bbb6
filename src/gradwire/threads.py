"""How gradwire starts threads, which locks forbid a thread to wait, and what a fork leaves behind.

Note [Starting a thread]: the garbage collector may run the user's finalizers on a thread that has
just started, before any work of gradwire, and such a finalizer may make a call. `Thread.start`
waits for the new thread meanwhile. Both can deadlock: the starting thread may hold a lock that the
call needs, and the call may need the work that the new thread was started for. So the collector is
off from before the start until the new thread has recorded its duty (what it does for other
threads). If a finalizer makes a call on a thread that has a duty, another thread takes over the
duty before the call waits: see `ChannelReaders.wait`.

Note [Waiting with a lock]: a thread that holds a lock may be interrupted by a finalizer or a signal
handler that makes a call. If the call waited, no other thread could take the lock, and the answer
might need it. So `check_may_wait` refuses the call. See docs/threads.md, Rules.

Note [One step of the interpreter]: tables that every call uses have no lock, because a finalizer
that interrupts the holder of a lock can make no call. They rely on the GIL (`check_gil`): one
method of a builtin container (`list.pop`, `dict.pop`, `set.add`) is not interrupted by another
thread or a finalizer, and other threads see the writes of a thread in the order it made them.

Note [After a fork]: a forked process shares its parent's connections, has none of the threads that
use them, and any lock may have been held at that moment. So it sends, reads and shuts down nothing:
each owner of a descriptor closes its copy, which the parent does not notice. If the parent dies,
its peers see the end only once every copy is closed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import call, methodcaller
from typing import Any, Final, NoReturn, Protocol, cast, final
from weakref import WeakSet

from gradwire.errors import UsageError

FORKED = "this process was forked from a worker, whose threads and connections it lacks"
MAKE_IT_ELSEWHERE = "let it put a note into a queue.SimpleQueue, and make the call elsewhere"
"""The advice for a finalizer whose call was refused."""

Undo = Callable[[], None]

# -- starting


class Duty(Protocol):
    """What a thread does for other threads."""

    @property
    def may_wait(self) -> bool:
        """Whether another thread can take its place."""

    def hand_over(self, channel: object, /) -> Undo | None:
        """Replace the calling thread, which is about to wait for a message on this channel.

        Returns what to call when the thread continues, if anything.
        """


@final
class _Irreplaceable:
    may_wait = False

    def hand_over(self, _: object, /) -> None:
        """Not called, as the thread does not wait."""


IRREPLACEABLE = _Irreplaceable()
"""The duty of a thread that no other can replace: a finalizer on it may not wait."""


@contextmanager
def needed_by_others() -> Iterator[None]:
    """A finalizer or a signal handler that interrupts the block may not wait.

    The block holds a lock that is not among `WorkerLocks`, or leaves half done what an answer needs
    to be read. Thread.start inside of it waits, so handlers often come.
    """
    before, mine.duty = mine.duty, IRREPLACEABLE
    try:
        yield
    finally:
        mine.duty = before


class _CurrentDuty(threading.local):
    duty: Duty | None = None


mine = _CurrentDuty()
"""The duty of this thread, for all workers of the process."""


@final
class _CollectorSwitch:
    """Keeps Python's garbage collector off while any thread starts."""

    def __init__(self) -> None:
        self._starts: list[None] = []
        """No lock: each change of it is one step for the interpreter."""
        self._is_off = False
        """by this class; if the user has switched it off, it stays off"""

    def pause(self) -> None:
        self._starts.append(None)
        if gc.isenabled():
            self._is_off = True
            gc.disable()

    def resume(self) -> None:
        """One start is over. The last one enables collection; two that do so at once do no harm."""
        if self._starts:  # a forked process has none of the threads that were starting
            self._starts.pop()
        if not self._starts and self._is_off:
            self._is_off = False
            gc.enable()

    def forked(self) -> None:
        self._starts.clear()
        self.resume()


_collector = _CollectorSwitch()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside the block, which has to be short."""
    _collector.pause()
    try:
        yield
    finally:
        _collector.resume()


@final
class _DutyThread(threading.Thread):
    """A daemon thread that enables garbage collection once it has recorded its duty."""

    def __init__(self, name: str, target: Callable[[], None], duty: Duty | None) -> None:
        super().__init__(name=name, daemon=True)
        self._main, self._duty = target, duty

    def start(self) -> None:
        """See Note [Starting a thread]."""
        _collector.pause()
        try:
            super().start()
        except RuntimeError:  # the system has no thread left
            _collector.resume()
            raise

    def run(self) -> None:
        """Record the duty, then run the target."""
        mine.duty = self._duty
        main = self._main
        del self._main, self._duty  # or they would live as long as a reference to the thread
        _collector.resume()
        main()


Spawn = Callable[[str, Callable[[], None], Duty | None], None]
"""`Threads.spawn` of a worker."""


def thread(name: str, target: Callable[[], None], duty: Duty | None = None) -> threading.Thread:
    """A daemon thread that is not started yet."""
    return _DutyThread(name, target, duty)


@final
class Threads:
    """The threads of one worker that last as long as the worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._alive: set[threading.Thread] = set()
        # No lock: each use of it is one step. To start a thread takes a lock of Python's own, and
        # a finalizer that interrupts its holder may wait for any lock that we would hold meanwhile.

    def spawn(self, what: str, target: Callable[[], None], duty: Duty | None = None) -> None:
        """Start `target` on a thread whose name says what it does."""

        def run() -> None:
            try:
                target()
            finally:
                self._alive.discard(started)

        started = thread(f"{self._name} {what}", run, duty)
        self._alive.add(started)
        try:
            started.start()
        except RuntimeError:  # the system has no thread left
            self._alive.discard(started)
            raise

    def join(self, seconds: float) -> None:
        """Join the threads that are alive now, each for at most so many seconds."""
        for each in self._alive - {threading.current_thread()}:
            with suppress(RuntimeError):  # it is being started, and will see that all is closed
                each.join(seconds)


# -- locks

_NEVER = object()
_is_mine: Callable[[threading.RLock], bool] = methodcaller("_is_owned")


def taking(lock: threading.Lock) -> Iterator[bool]:
    """An iterator of which each step tries to take the lock, and says whether it did.

    `for has_it in taking: break` takes the lock and records that in one step for the interpreter.
    An interrupt may come after any call, but not between these two.
    """
    return iter(partial(lock.acquire, False), _NEVER)


_all_locks: WeakSet[WorkerLocks] = WeakSet()
_is_owned: tuple[Callable[[], bool], ...] = ()
"""For each lock of each worker of the process: a finalizer may belong to another worker."""


@final
class WorkerLocks:
    """The locks of one worker with which its threads may not wait."""

    def __init__(self, name: str, *locks: threading.RLock) -> None:
        self.name = name
        self.locks: list[threading.RLock] = [*locks]
        _all_locks.add(self)
        _list_locks()

    def add(self, lock: threading.RLock) -> None:
        """Include this lock."""
        self.locks.append(lock)
        _list_locks()

    def forked(self) -> None:
        """In a forked process: threads that it does not have may have held them."""
        renew_after_fork(*self.locks)


def check_gil() -> None:
    """UsageError on a free-threaded Python that runs without the GIL."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise UsageError(
            "gradwire relies on Python's global interpreter lock, which is off",
            hint="use a Python that is not free-threaded, or set PYTHON_GIL=1",
        )


def check_may_wait(what: str) -> None:
    """UsageError if this thread holds a lock or is irreplaceable. hot: each request, each wait"""
    duty = mine.duty
    if duty is not None and not duty.may_wait:
        raise UsageError(
            f"{what} was asked for by a finalizer or a signal handler on a thread that others need",
            hint=MAKE_IT_ELSEWHERE,
        )
    if any(map(call, _is_owned)):  # a loop in C: one step of the interpreter for all locks
        held = (each.name for each in list(_all_locks) if any(map(_is_mine, each.locks)))
        raise UsageError(
            f"{what} was asked for by a finalizer or a signal handler which interrupts "
            f"{next(held, 'Python')} while it holds a lock",
            hint=MAKE_IT_ELSEWHERE,
        )


_python_lock: Final = getattr(threading, "_active_limbo_lock", None)
"""Python holds it while it starts or ends a thread. No other thread can be started then, and to
wait may need one. It is private: where it is missing, or no RLock, such a wait is not refused.
"""


def _list_locks() -> None:
    global _is_owned  # replaced as a whole, as `check_may_wait` reads it without a lock
    locks = [lock for each in list(_all_locks) for lock in each.locks]
    if _python_lock is not None and hasattr(_python_lock, "_is_owned"):
        locks.append(_python_lock)
    _is_owned = tuple(cast(Any, lock)._is_owned for lock in locks)


# -- forks


class Inherited(Protocol):
    """An object that a forked process has to let go of."""

    def forked(self) -> None:
        """Called in the new process, at once: take no lock, send nothing, start nothing."""


_inherited: WeakSet[Inherited] = WeakSet()


def leave_fork(error: BaseException | None) -> NoReturn:
    """End a process that a served function has forked, and in which it has returned or raised.

    Not by the end of its only thread, which is not Python's main thread: torch's destructors of
    thread-locals then abort the process.
    """
    status = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
    flush_output()
    os._exit(status & 0xFF)


def flush_output() -> None:
    """Flush output that does not end with a newline."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(ValueError, OSError):  # closed, or without a reader
                stream.flush()


def call_after_fork(thing: Inherited) -> None:
    """Call its `forked` in each process that is forked from this one while it lives."""
    _inherited.add(thing)


def renew_after_fork(*locks: threading.RLock) -> None:
    """In a forked process: free the locks of other threads; this thread releases its own."""
    for lock in locks:
        if not _is_mine(lock):
            cast(Any, lock)._at_fork_reinit()


def _forked() -> None:
    _collector.forked()
    for thing in list(_inherited):
        with suppress(Exception):  # one that fails must not keep the others open
            thing.forked()


os.register_at_fork(after_in_child=_forked)
