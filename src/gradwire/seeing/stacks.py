"""The Python stacks of all threads of this process, as text; those of the user's program first.

Of each thread first its frames in the user's code, the innermost on top, and then the others. C
code is not seen: a thread that runs some is where it was entered from Python.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from gradwire.seeing.status import MOST_STACKS, sendable

_MOST_THREADS = 64
_MOST_FRAMES = 40
_MOST_LINE = 120
_LIBRARIES = tuple(
    {
        f"{Path(path).parent}{os.sep}"
        for path in (threading.__file__, torch.__file__, Path(__file__).parent.as_posix())
    }
    | {f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib", "stdlib")}
)
"""Where the code is that is not the user's."""


class FrameText(NamedTuple):
    """One frame of a stack."""

    place: str
    line: str
    """the line of the program; empty if its source is not there"""
    is_users: bool


class ThreadStack(NamedTuple):
    """One thread, the innermost frame first."""

    name: str
    frames: Sequence[FrameText]

    @property
    def is_users(self) -> bool:
        """Whether it runs code of the user."""
        return any(frame.is_users for frame in self.frames)


def stacks_of_this_process() -> str:
    """The stacks of all threads but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    me, found = threading.get_ident(), []
    for ident, frame in sys._current_frames().items():
        if ident != me:
            name = names.get(ident, f"a thread that Python did not start ({ident})")
            found.append(ThreadStack(name, _frames_above(frame)))
    return text_of(found)


def text_of(stacks: Iterable[ThreadStack]) -> str:
    """The text of these stacks, of a bounded size."""
    ordered = sorted(stacks, key=lambda stack: (not stack.is_users, stack.name))
    parts = [_text_of_one(stack) for stack in ordered[:_MOST_THREADS]]
    if len(ordered) > _MOST_THREADS:
        parts.append(f"… and {len(ordered) - _MOST_THREADS} more threads")
    text = sendable("\n\n".join(parts))
    return text if len(text) <= MOST_STACKS else text[: MOST_STACKS - 2] + "\n…"


def _text_of_one(stack: ThreadStack) -> str:
    ours = [frame for frame in stack.frames if frame.is_users]
    rest = [frame for frame in stack.frames if not frame.is_users]
    lines = [stack.name]
    for frame in ours[:_MOST_FRAMES]:
        lines += [f"  > {frame.place}", *([f"      {frame.line}"] if frame.line else [])]
    lines += [f"    {frame.place}" for frame in rest[:_MOST_FRAMES]]
    hidden = max(0, len(ours) - _MOST_FRAMES) + max(0, len(rest) - _MOST_FRAMES)
    return "\n".join([*lines, *([f"    … and {hidden} more frames"] if hidden else [])])


def _frames_above(frame: FrameType | None) -> list[FrameText]:
    found: list[FrameText] = []
    while frame is not None and len(found) < 10 * _MOST_FRAMES:
        code, number = frame.f_code, frame.f_lineno
        is_users = not code.co_filename.startswith((*_LIBRARIES, "<frozen", "<string>"))
        line = linecache.getline(code.co_filename, number).strip() if is_users else ""
        place = f"{_short(code.co_filename)}:{number} in {code.co_qualname}"
        found.append(FrameText(place, line[:_MOST_LINE], is_users))
        frame = frame.f_back
    return found


def _short(path: str) -> str:
    """A path without the place where libraries are installed."""
    for library in _LIBRARIES:
        if path.startswith(library):
            return os.path.relpath(path, Path(library).parent if "gradwire" in library else library)
    return path
