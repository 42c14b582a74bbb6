"""What a process that was forked from a worker does with the connections it has inherited.

It shares them with its parent: a byte that it sends or reads, or a shutdown, would be its parent's.
It has none of the threads that use them, and other threads may have held any lock at that moment.
So each thing that owns a descriptor closes its copy, which the parent does not notice. That matters
when the parent dies: its peers see the end of a connection only when every copy is closed.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any, Protocol, cast
from weakref import WeakSet

FORKED = "this process was forked from a worker, whose threads and connections it lacks"


class Inherited(Protocol):
    """What a forked process has to let go of."""

    def forked(self) -> None:
        """Called in the new process, at once: take no lock, send nothing, start nothing."""


_all: WeakSet[Inherited] = WeakSet()


def let_go_in_forks(thing: Inherited) -> None:
    """Call its `forked` in each process that is forked from this one while it lives."""
    _all.add(thing)


def renew_after_fork(*locks: threading.RLock) -> None:
    """In a forked process: free those that another thread had; what this one has it gives back."""
    for lock in locks:
        inner = cast(Any, lock)
        if not inner._is_owned():
            inner._at_fork_reinit()


def _let_go() -> None:
    for thing in list(_all):
        with suppress(Exception):  # one that fails must not keep the others open
            thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
