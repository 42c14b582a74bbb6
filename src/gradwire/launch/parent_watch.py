"""How a started process notices that the one which started it is gone, and ends with it.

The parent holds the other end of a line; when it dies, however it dies, the line ends. A process
that the parent forked may hold a copy of that end and outlive it, so its number is looked at too.
"""

from __future__ import annotations

import os
import shutil
import threading
from multiprocessing.connection import Connection
from pathlib import Path

_LOOK_AGAIN_SECONDS = 1.0
_ORPHANED = 1


def end_with_parent(line: Connection, parent: int, directory: Path | None = None) -> None:
    """From now on this process ends when its parent does, and removes the directory they share.

    The parent says nothing on the line, so this may be the only reader of it.
    """
    threading.Thread(
        target=_watch, args=(line, parent, directory), name="gradwire lifeline", daemon=True
    ).start()


def _watch(line: Connection, parent: int, directory: Path | None) -> None:
    while os.getppid() == parent and not _has_ended(line):
        pass
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(_ORPHANED)


def _has_ended(line: Connection) -> bool:
    try:
        if line.poll(_LOOK_AGAIN_SECONDS):
            line.recv_bytes()
    except (EOFError, OSError):
        return True
    return False
