"""Checkpoints that a function has left open on a thread which serves others after it.

Note [A checkpoint whose function raises]:
    Before torch 2.13, a checkpoint that is not reentrant ends only when the exception dies that its
    function has raised. Its saved-tensor hooks belong to a thread: until that thread removes them
    they hold the inputs of the checkpoint, and take what other code saves there. The exception may
    die on another thread, by a collection, or because something there has looked at all objects.
    Then hooks of that thread are removed, and the others stay for ever. So a thread of gradwire
    ends the checkpoint when the function is over that it has run for a peer or as a callback.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Generator
from typing import final

from gradwire.torch_private import NO_RUN, current_run

_log = logging.getLogger("gradwire")
Checkpoint = Generator[None, None, None]
"""torch's generator function of a checkpoint yields while the function of the checkpoint runs"""


@final
class _Opened(threading.local):
    """The checkpoints that this thread has begun and that are alive, outermost first."""

    def __init__(self) -> None:
        self.checkpoints: list[weakref.ref[Checkpoint]] = []


opened = _Opened()


def begun(checkpoint: Checkpoint) -> Checkpoint:
    """Note a checkpoint that this thread is about to begin."""
    if current_run() == NO_RUN:  # the engine itself puts the hooks back that a run has changed
        checkpoints = opened.checkpoints
        checkpoints.append(weakref.ref(checkpoint, checkpoints.remove))
    return checkpoint


def end_left_open(before: int = 0) -> None:
    """Code of the user's is over, before which so many checkpoints were open: end its own."""
    while len(opened.checkpoints) > before:
        checkpoint = opened.checkpoints.pop()()
        if checkpoint is not None:
            try:
                checkpoint.close()
            except Exception:  # the others must be ended
                _log.exception("a checkpoint could not be ended")
