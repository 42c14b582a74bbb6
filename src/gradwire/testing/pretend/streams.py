"""Pretended streams and events: work that is queued, and runs later in a random order.

current stream of a thread ---> Stream: a queue of work, and of events that it waits for
                                    |
synchronize(), .cpu(), .item() -----+--> run it, and what it waits for
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import final

import torch

KIND = "pretend"
_EAGERNESS = 0.3
"""how often something runs when work is queued"""
lock = threading.RLock()
_order = random.Random(0)


class Recorded:
    """One recording of an event; done when its stream has come so far."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.is_done = stream, False


@final
class Event:
    """Marks a place in the work of a stream. A wait is for the latest record; none, no wait."""

    def __init__(self) -> None:
        self._latest: Recorded | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record it on a stream."""
        stream = stream or current_stream()
        recorded = self._latest = Recorded(stream)

        def mark() -> None:
            recorded.is_done = True

        stream.queue(mark)

    @property
    def latest(self) -> Recorded | None:
        """What a wait that begins now waits for."""
        return self._latest


@final
class Stream:
    """Work of one device, in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._work: deque[Callable[[], object] | Recorded] = deque()
        with lock:
            _streams.append(self)

    def queue(self, work: Callable[[], object]) -> None:
        """Run this after what is queued already."""
        with lock:
            self._work.append(work)
            while _order.random() < _EAGERNESS:
                _order.choice(_streams).step()

    def wait_event(self, event: Event) -> None:
        """What is queued from now on runs after the event."""
        if event.latest is not None:
            with lock:
                self._work.append(event.latest)

    def wait_stream(self, other: Stream) -> None:
        """What is queued from now on runs after what the other stream has now."""
        event = Event()
        event.record(other)
        self.wait_event(event)

    def step(self) -> bool:
        """Run the next work, if there is some that need not wait. With the lock held."""
        if not self._work:
            return False
        work = self._work[0]
        if isinstance(work, Recorded):
            if not work.is_done:
                return False
            self._work.popleft()
            return True
        self._work.popleft()
        work()
        return True

    def synchronize(self) -> None:
        """Run all work of this stream, and only what that waits for."""
        with lock:
            while self._work:
                if not self.step():
                    waits_for = self._work[0]
                    assert isinstance(waits_for, Recorded)
                    while not waits_for.is_done:
                        _advance(waits_for.stream)


def _advance(stream: Stream) -> None:
    """One step of a stream, or of what it waits for."""
    if not stream.step():
        work = stream._work[0]
        assert isinstance(work, Recorded)
        assert work.stream is not stream, "streams wait in a circle"
        _advance(work.stream)


_streams: list[Stream] = []


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams: dict[torch.device, Stream] = {}


_current = _Current()


@cache
def default_stream(device: torch.device) -> Stream:
    """The stream of a device that all threads use unless they say otherwise."""
    return Stream(device)


def current_stream(device: torch.device | str = f"{KIND}:0") -> Stream:
    """The stream of this thread for a device."""
    device = torch.device(device)
    return _current.streams.get(device) or default_stream(device)


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Operators of this thread are queued on this stream."""
    before = _current.streams.get(stream.device)
    _current.streams[stream.device] = stream
    try:
        yield
    finally:
        if before is None:
            del _current.streams[stream.device]
        else:
            _current.streams[stream.device] = before


def synchronize() -> None:
    """Run all work of all streams."""
    with lock:
        for stream in _streams:
            stream.synchronize()


def shuffle(seed: int) -> None:
    """Begin a new order of work among streams."""
    with lock:
        _order.seed(seed)
