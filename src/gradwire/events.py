"""Events: what a worker did, as values with a one-line text form.

One stream per worker, for traces and golden tests. Without listeners it costs one attribute read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """`worker` did `what` with `id`, towards `peer` if there is one.

    >>> print(Event("w0", "call", "w0#1", peer="w1"))
    w0>w1 call w0#1
    """

    worker: str
    what: str
    id: str
    peer: str | None = None

    def __str__(self) -> str:
        arrow = "" if self.peer is None else f">{self.peer}"
        return f"{self.worker}{arrow} {self.what} {self.id}"


class Events:
    """The event stream of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.listeners: tuple[Callable[[Event], None], ...] = ()
        """hot paths check it before they make an event"""

    def emit(self, what: str, id: object, peer: str | None = None) -> None:
        """Pass an event to every listener."""
        if self.listeners:
            event = Event(self._worker, what, str(id), peer)
            for listener in self.listeners:
                listener(event)

    @contextmanager
    def subscribe(self, listener: Callable[[Event], None]) -> Iterator[None]:
        """Call `listener` with every event inside the block, on the thread where it happens."""
        self.listeners += (listener,)
        try:
            yield
        finally:
            self.listeners = tuple(each for each in self.listeners if each is not listener)
