"""How far a long command is: a bar on a terminal, elsewhere a line now and then.

It goes to stderr, so that stdout has the results alone. No thread is started: some commands fork.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

SECONDS = "s"
"""the unit of a command that runs for a given time"""
DRAW_EVERY, SAY_EVERY = 0.1, 30.0
_CLEAR = "\r\x1b[K"
_LEAST_BAR = 10


# -- pure: what is said, and when


def rate_text(each: float) -> str:
    """How fast it goes: so many in a second, or how long each takes."""
    return f"{1 / each:.0f}/s" if each < 0.5 else f"{each:.1f} s each"


def left_text(seconds: float) -> str:
    """How long it still takes."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit} left"
    return f"{seconds:.0f} s left"


def progress_text(
    done: float, total: float, each: float, *, unit: str, failed: str = "", note: str = ""
) -> str:
    """One line: `120 of 500 programs, 24/s, 16 s left, 2 differ, note`.

    `each` is the seconds that one takes, or 0 if that is not known yet.
    """
    rate = rate_text(each) if each and unit != SECONDS else ""
    left = left_text(each * (total - done)) if each and done < total else ""
    parts = [f"{done:.0f} of {total:.0f} {unit}", rate, left, failed, note]
    return ", ".join(part for part in parts if part)


def bar_text(done: float, total: float, text: str, columns: int) -> str:
    """The text behind a bar that fills the rest of the line, or alone if there is no room."""
    room = columns - len(text) - 4
    if room < _LEAST_BAR:
        return text[: columns - 1]
    filled = int(room * min(1.0, done / total)) if total else room
    return f"[{'#' * filled:-<{room}}] {text}"


class Pace:
    """When it is time to say something again."""

    def __init__(self, every: float, now: float) -> None:
        self._every, self._last = every, now

    def is_due(self, now: float) -> bool:
        """Whether so many seconds are over since it last was."""
        if now - self._last < self._every:
            return False
        self._last = now
        return True


def shows_bars(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether a person looks at it, who wants one line that changes."""
    return stream.isatty() and environment.get("TERM") != "dumb" and not environment.get("CI")


# -- effects


class Progress:
    """Counts what is done, and what has failed if there is a word for it, and shows it.

    Any thread may call it.

    with Progress(500, "programs", failed="differ") as progress:
        for program in programs:
            progress.advance(failed=not play(program))
    """

    def __init__(
        self,
        total: float,
        unit: str,
        *,
        failed: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._unit, self._word, self._clock = total, unit, failed, clock
        self._stream = stream or sys.stderr
        self._lock = threading.RLock()
        self._has_bar = shows_bars(self._stream, os.environ)
        self._began = clock()
        self._first: tuple[float, float] | None = None
        self._pace = Pace(DRAW_EVERY if self._has_bar else SAY_EVERY, self._began)
        self._done, self._failed, self._note, self._is_drawn = 0.0, 0, "", False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._clear()

    def advance(self, done: float = 1, *, failed: int = 0) -> None:
        """So much more is done, and so much more has failed."""
        with self._lock:
            self._done += done
            self._failed += failed
            self._show()

    def reach(self, done: float | None = None, *, failed: int | None = None) -> None:
        """So much is done by now; without a number, the seconds that are over."""
        with self._lock:
            self._done = min(self._total, self._clock() - self._began) if done is None else done
            self._failed = self._failed if failed is None else failed
            self._show()

    def note(self, text: str) -> None:
        """What is under way now."""
        with self._lock:
            self._note = text
            self._show()

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line that stays, on stdout unless said."""
        with self._lock:
            was_drawn = self._is_drawn
            self._clear()
            print(text, file=stream or sys.stdout, flush=True)
            if was_drawn:
                self._draw()

    def text(self) -> str:
        """How far it is, in words."""
        failed = f"{self._failed} {self._word}" if self._word else ""
        return progress_text(
            self._done, self._total, self._each(), unit=self._unit, failed=failed, note=self._note
        )

    def _each(self) -> float:
        """The seconds that one takes, since the first was done: until then something started."""
        if self._unit == SECONDS:
            return 1.0
        if self._first is None:
            return 0.0
        then, done = self._first
        more = self._done - done
        return (self._clock() - then) / more if more > 0 else 0.0

    def _show(self) -> None:
        if self._first is None and self._done > 0:
            self._first = self._clock(), self._done
        if not self._pace.is_due(self._clock()):
            return
        if self._has_bar:
            self._draw()
        else:
            print(self.text(), file=self._stream, flush=True)

    def _draw(self) -> None:
        columns = shutil.get_terminal_size().columns
        line = bar_text(self._done, self._total, self.text(), columns)
        print(f"{_CLEAR}{line}", end="", file=self._stream, flush=True)
        self._is_drawn = True

    def _clear(self) -> None:
        if self._is_drawn:
            print(_CLEAR, end="", file=self._stream, flush=True)
            self._is_drawn = False
