"""One line on a terminal while the workers of a run start, if that takes long; then it is gone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO, final

from gradwire.options import is_terminal_plain

_PATIENCE_SECONDS = 1.0
"""before anything is shown"""
_CLEAR = "\r\x1b[K"


def startup_text(started: int, joined: int, workers: int, seconds: float) -> str:
    """What to show so many seconds after the beginning; '' for nothing."""
    if seconds < _PATIENCE_SECONDS or joined >= workers:
        return ""
    if started < workers:
        return f"{started} of {workers} workers have started"
    return f"{joined} of {workers} workers have joined"


@final
class StartupLine:
    """How many workers have started and joined. It writes nothing if stderr is no terminal."""

    def __init__(
        self,
        workers: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream: TextIO | None = stream or sys.stderr  # None without a console
        is_seen = self._stream is not None and self._stream.isatty()
        self._is_over = not is_seen or is_terminal_plain()
        self._workers, self._clock, self._began = workers, clock, clock()
        self._started: set[int] = set()
        self._joined: set[int] = set()
        self._shown = ""

    def __enter__(self) -> StartupLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("")
        self._is_over = True

    def started(self, worker: int) -> None:
        """The process of a worker runs."""
        self._started.add(worker)

    def joined(self, worker: int) -> None:
        """A worker knows the others. Once all do, the line does not come back."""
        self._joined.add(worker)
        if len(self._joined) == self._workers:
            self.__exit__(None, None, None)

    def show(self) -> None:
        """Draw the line, if it is time and if it has changed."""
        started, joined = len(self._started), len(self._joined)
        seconds = self._clock() - self._began
        self._write(startup_text(started, joined, self._workers, seconds))

    def _write(self, text: str) -> None:
        if self._is_over or text == self._shown:
            return
        assert self._stream is not None, "there is a terminal"
        self._stream.write(_CLEAR + text)
        self._stream.flush()
        self._shown = text
