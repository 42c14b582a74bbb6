"""Hear what a worker does, at the moment at which it does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gradwire.ids import WorkerId
from gradwire.rpc.worker import Worker
from gradwire.seeing.messages import Event
from gradwire.seeing.recording import read

LOCAL = {"waited", "serve", "settled", "awaited", "answered", "encode", "decode", "step", "span"}
"""waits and work, of which nothing crosses"""


@contextmanager
def hearing(worker: Worker, listener: Callable[[Event], None]) -> Iterator[None]:
    """Call `listener(event)` with each event inside the block, on the thread where it happens."""
    events = worker.events
    recorded, noted = events.record, events.note

    def record(
        what: str,
        began: float,
        id: object,
        peer: WorkerId | str | None = None,
        about: object = "",
        size: int = 0,
    ) -> None:
        if recorded is not None:
            recorded(what, began, id, peer, about, size)
        hear(what, id, peer, about, began)

    def note(what: str, id: object, peer: WorkerId | str | None = None, about: str = "") -> None:
        noted(what, id, peer, about)
        hear(what, id, peer, about, events.now())

    def hear(
        what: str, id: object, peer: WorkerId | str | None, about: object, began: float
    ) -> None:
        (event,) = read(worker, [(0, what, began, events.now(), 0, id, peer, about, 0)])
        listener(event)

    events.record, events.note = record, note  # type: ignore[method-assign]
    try:
        yield
    finally:
        events.record = recorded
        events.note = noted  # type: ignore[method-assign]
