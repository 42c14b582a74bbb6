"""Processes of this machine that never outlive the block that started them.

Knows how to start, hear and stop them; not what they do. Each has a line to us: it tells its news
as single words, and its end tells it that we are gone (parent_watch.py). Words are short on
purpose: a line that could fill up, or stop in the middle of a message, would be a wait without a
deadline.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Concatenate, NamedTuple, ParamSpec, final

P = ParamSpec("P")

_LOOK_AGAIN_SECONDS = 1.0
_TERM_SECONDS = 3.0
_KILL_SECONDS = 5.0

_log = logging.getLogger("gradwire")


class Word(NamedTuple):
    """A process said this."""

    process: int
    word: str


class Exit(NamedTuple):
    """A process is over: its exit status, or minus the signal that ended it."""

    process: int
    status: int


News = Word | Exit


@final
class ProcessGroup:
    """The processes, by number, in the order they were started."""

    def __init__(self) -> None:
        self._started = 0
        self._processes: dict[int, SpawnProcess] = {}
        self._lines: dict[int, Connection] = {}

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self,
        name: str,
        main: Callable[Concatenate[Connection, int, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> int:
        """Start a process that runs `main(line, our process id, *args)`; its number here."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        number = self._started
        process = context.Process(
            target=main, args=(theirs, os.getpid(), *args), kwargs=kwargs, name=name
        )
        self._lines[number] = ours
        self._processes[number] = process
        self._started += 1
        with theirs, _interrupts_held():
            process.start()
        return number

    def pid(self, number: int) -> int:
        """The process's number on this machine."""
        pid = self._processes[number].pid
        assert pid is not None
        return pid

    def news(self, seconds: float) -> list[News]:
        """What has happened, waiting for it if need be; empty if nothing has by then."""
        going = list(self._processes)
        waited_for: list[Connection | int] = [self._processes[n].sentinel for n in going]
        waited_for += [self._lines[n] for n in going if n in self._lines]
        # A process forked by one of ours can hold its sentinel open after it: look for oneself.
        connection.wait(waited_for, max(0.0, min(seconds, _LOOK_AGAIN_SECONDS)))
        return [news for n in going for news in self._news_of(n)]

    def stop(self) -> None:
        """End every process, gently, then not; when this returns none is left. Idempotent."""
        try:
            self._end(SpawnProcess.terminate, _TERM_SECONDS)
        finally:  # a second Ctrl-C while the first is seen to: no more patience, but no less care
            self._end(SpawnProcess.kill, _KILL_SECONDS)
            self._forget()

    def _news_of(self, n: int) -> Iterator[News]:
        status = self._processes[n].exitcode  # before its words: those said until then are there
        yield from self._words_of(n)
        if status is not None:
            self._processes.pop(n).close()
            if n in self._lines:
                self._lines.pop(n).close()
            yield Exit(n, status)

    def _words_of(self, n: int) -> Iterator[Word]:
        line = self._lines.get(n)
        try:
            while line is not None and line.poll():
                yield Word(n, line.recv_bytes().decode())
        except (EOFError, OSError):
            self._lines.pop(n).close()

    def _end(self, how: Callable[[SpawnProcess], None], seconds: float) -> None:
        alive = [process for process in self._processes.values() if _is_alive(process)]
        for process in alive:
            how(process)
        deadline = time.monotonic() + seconds
        for process in alive:
            _join(process, deadline)

    def _forget(self) -> None:
        for process in self._processes.values():
            if _is_alive(process):
                _log.error("process %s (%s) did not end when killed", process.pid, process.name)
            else:
                process.close()
        for line in self._lines.values():
            line.close()
        self._processes.clear()
        self._lines.clear()
        self._started = 0


def _is_alive(process: SpawnProcess) -> bool:
    return process.pid is not None and process.exitcode is None


def _join(process: SpawnProcess, deadline: float) -> None:
    """Not Process.join alone: see `news` on sentinels that others hold."""
    while process.exitcode is None and (left := deadline - time.monotonic()) > 0:
        process.join(min(left, 0.1))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A Ctrl-C waits until the block is over, and the process started in it never hears of it.

    A terminal sends it to all, and each process that still imports would print a traceback.
    """
    # It lifts the mask when it is first started, by the first process.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """In a started process: a Ctrl-C is the parent's affair, which ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
