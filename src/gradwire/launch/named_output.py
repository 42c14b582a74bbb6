"""The name of the worker before each line that it prints, so that many can share one terminal.

Each thread has its own unfinished line, and a line is written at once when it ends: no line has
parts of two. Only what Python prints passes here, not what code in C writes to the descriptors.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, final

from gradwire.options import Output, is_terminal_plain

_COLOURS = (36, 33, 35, 32, 34, 31)


def prefix_of(name: str, rank: int, *, colour: bool) -> str:
    """What stands before a line of this worker."""
    text = f"[{name}]"
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} "


def split_lines(text: str) -> tuple[list[str], str]:
    """The whole lines of a text, and what follows them."""
    *lines, rest = text.split("\n")
    return lines, rest


@final
class NamedOutput:
    """Stands for a text stream. Only the ends of lines flush it: half a line would be torn."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream, self._prefix, self._process = stream, prefix, os.getpid()
        self._lock = threading.RLock()  # a signal handler may print
        self._begun: dict[int, str] = {}
        """the unfinished line of each thread"""

    def write(self, text: str) -> int:
        """Write the lines that end with this text."""
        me = threading.get_ident()
        with self._lock:
            lines, rest = split_lines(self._begun.pop(me, "") + text)
            if rest:
                self._begun[me] = rest
            self._write(lines)
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """As of a file."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is complete; it is written already."""
        self._stream.flush()

    def finish(self) -> None:
        """Write the unfinished lines too; in a forked process they belong to the other."""
        with self._lock:
            left = list(self._begun.values())
            self._begun.clear()
            self._write(left if os.getpid() == self._process else [])

    def _write(self, lines: list[str]) -> None:
        if lines:  # in one write
            self._stream.write("".join(f"{self._prefix}{line}\n" for line in lines))
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def named_output(name: str, rank: int, output: Output) -> Iterator[None]:
    """In the block, lines on stdout and stderr begin with the name, if the options want it."""
    streams = sys.stdout, sys.stderr
    made = [_maybe_named(stream, name, rank, output) for stream in streams]
    sys.stdout, sys.stderr = (new or old for new, old in zip(made, streams, strict=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for each in made:
            if each is not None:
                each.finish()


def _maybe_named(stream: TextIO | None, name: str, rank: int, output: Output) -> NamedOutput | None:
    is_seen = stream is not None and stream.isatty()
    if stream is None or output == "plain" or (output == "auto" and not is_seen):
        return None
    return NamedOutput(stream, prefix_of(name, rank, colour=is_seen and not is_terminal_plain()))
