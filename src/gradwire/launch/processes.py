"""A group of child processes that never outlive the `with` block that started them.

Each reports its progress through a pipe, in single words: if a pipe could fill up, or stop in the
middle of a message, that would be a wait without a deadline.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from operator import methodcaller
from types import ModuleType
from typing import Literal, NamedTuple, TypeVarTuple, final

from gradwire.errors import UsageError
from gradwire.launch.fork_server import (
    CannotFork,
    ForkedProcess,
    ForkServer,
    is_writable,
    no_interrupt_from_terminal,
    told,
)

Ts = TypeVarTuple("Ts")
StartMethod = Literal["forkserver", "spawn"]
METHODS: tuple[StartMethod, ...] = ("forkserver", "spawn")
_Process = SpawnProcess | ForkedProcess

_LOOK_AGAIN_SECONDS = 1.0
_TERM_SECONDS = 3.0
_KILL_SECONDS = 5.0

_log = logging.getLogger("gradwire")


class ProcessEvent(NamedTuple):
    """A process reported a word; or it ended, with an exit status, or minus the signal's number."""

    process: int
    news: str | int


@final
class ProcessGroup:
    """Child processes, numbered in the order in which they were started.

    By "forkserver" they are forks of a server (fork_server.py), or spawned if it is of no use.
    """

    def __init__(
        self,
        method: StartMethod = "spawn",
        start_seconds: float = 60.0,
        waiting: Callable[[], None] = lambda: None,  # now and then while the server starts
        *,
        imports_main: bool = True,
    ) -> None:
        if method not in METHODS:
            raise UsageError(f"run(start_method={method!r}) is none of {', '.join(METHODS)}")
        self._method, self._start_seconds, self._waiting = method, start_seconds, waiting
        self._imports_main = imports_main
        self._server: ForkServer | None = None
        self._started = 0
        self._children: dict[int, tuple[_Process, Connection]] = {}

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, main: Callable[[Connection, int, *Ts], None], *args: *Ts) -> int:
        """Start a process that runs `main(pipe, parent process id, *args)`; returns its number."""
        number, self._started = self._started, self._started + 1
        if self._method == "forkserver":
            try:
                self._start_fork(number, name, main, args)
                return number
            except CannotFork as error:
                _log.info("workers are spawned, not forked: %s", error)
                self._method = "spawn"
        self._start_new(number, name, main, args)
        return number

    def _start_fork(
        self, number: int, name: str, main: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        if self._server is None:
            self._server = ForkServer(self._start_seconds, self._waiting)
        ours, theirs = multiprocessing.Pipe(duplex=True)
        try:
            with theirs:
                process = self._server.fork(name, theirs, self._start_seconds)
            self._children[number] = process, ours
        except BaseException:
            ours.close()
            raise
        with suppress(BrokenPipeError):  # it has died; its status says how
            ours.send_bytes(told(name, main, args, imports_main=self._imports_main))

    def _start_new(
        self, number: int, name: str, main: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(target=main, args=(theirs, os.getpid(), *args), name=name)
        self._children[number] = process, ours
        # Starting the tracker, which the first process does, would unblock SIGINT again.
        resource_tracker.ensure_running()
        without_script = nullcontext() if self._imports_main else _without_main()
        with no_interrupt_from_terminal(), theirs, without_script:
            process.start()

    def pid(self, number: int) -> int:
        """The process id."""
        pid = self._children[number][0].pid
        assert pid is not None
        return pid

    def tell(self, number: int, message: bytes) -> bool:
        """Send a short message to a process; False if it is gone, or has not read the last ones.

        From one thread at a time, which may be another than that of `events`.
        """
        if number not in self._children:
            return False
        _, pipe = self._children[number]
        try:
            if not is_writable(pipe.fileno()):
                return False
            pipe.send_bytes(message)
        except OSError:  # it has ended
            return False
        return True

    def terminate(self) -> None:
        """Send SIGTERM to every process. From any thread."""
        for process, _ in list(self._children.values()):
            with suppress(OSError, ValueError):  # its end was seen at this moment
                process.terminate()

    @property
    def is_empty(self) -> bool:
        """Whether every process has ended."""
        return not self._children

    def events(self, seconds: float) -> list[ProcessEvent]:
        """Wait for events for at most `seconds`; returns those that happened."""
        waited_for: list[Connection | int] = []
        for process, pipe in self._children.values():
            waited_for += [process.sentinel] if pipe.closed else [process.sentinel, pipe]
        # A grandchild can hold the sentinel of its dead parent open: poll the exit codes too.
        connection.wait(waited_for, max(0.0, min(seconds, _LOOK_AGAIN_SECONDS)))
        return [news for n in list(self._children) for news in self._events_of(n)]

    def stop(self) -> None:
        """End every process with SIGTERM, then SIGKILL; none is left afterwards. Idempotent."""
        try:
            self._end(methodcaller("terminate"), _TERM_SECONDS)
        finally:  # a second Ctrl-C skips the wait, but not the kill
            self._end(methodcaller("kill"), _KILL_SECONDS)
            for process, pipe in self._children.values():
                pipe.close()
                if _is_alive(process):
                    _log.error("process %s (%s) did not end when killed", process.pid, process.name)
                else:
                    process.close()
            self._children.clear()
            self._started = 0
            if self._server is not None:
                self._server.stop()
                self._server = None

    def _events_of(self, n: int) -> Iterator[ProcessEvent]:
        process, pipe = self._children[n]
        status = process.exitcode  # before the pipe, which then is complete
        try:
            while not pipe.closed and pipe.poll():
                yield ProcessEvent(n, pipe.recv_bytes().decode())
        except (EOFError, OSError):
            pipe.close()
        if status is not None:
            process.close()
            pipe.close()
            del self._children[n]
            yield ProcessEvent(n, status)

    def _end(self, how: Callable[[_Process], None], seconds: float) -> None:
        alive = [process for process, _ in self._children.values() if _is_alive(process)]
        for process in alive:
            how(process)
        deadline = time.monotonic() + seconds
        for process in alive:
            # Not join alone: see `events` on sentinels that grandchildren hold.
            while process.exitcode is None and (left := deadline - time.monotonic()) > 0:
                process.join(min(left, 0.1))


@contextmanager
def _without_main() -> Iterator[None]:
    """A process that multiprocessing spawns in the block does not import the program's script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _is_alive(process: _Process) -> bool:
    return process.pid is not None and process.exitcode is None
