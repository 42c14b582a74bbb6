"""What lies between two simulated workers, and one direction of a connection over it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from gradwire.testing.simulate.scheduler import Scheduler, Wait
from gradwire.transport.base import never
from gradwire.wire.message import Frame

_GLANCE_SECONDS = 0.005
USUAL_SECONDS = 0.002


class Watcher(Protocol):
    """Who is told what happens on links, and says what may."""

    def note(self, what: str, where: str, text: str) -> None:
        """Something for people happened."""

    def sent(self, frame: Frame) -> str:
        """A frame leaves; what it is called."""

    def may_repeat(self, frame: Frame) -> bool:
        """Whether the protocol lets this one come twice, and it shall."""


@dataclass(slots=True)
class Traffic:
    """What all pipes of a history share."""

    scheduler: Scheduler
    watcher: Watcher
    lost: int = 0
    """frames that went with their link"""
    late: int = 0
    """frames that came when nobody read them any more"""


@final
class Link:
    """What lies between two workers: how it is, whatever connections there are."""

    def __init__(self, a: str, b: str) -> None:
        self.name = f"{a}-{b}"
        self.ends = {a, b}
        self.slowness = 1.0
        self.is_stalled = self.is_cut = False
        self.pipes: list[Pipe] = []
        self.waits: list[Wait] = []


@final
class Pipe:
    """One direction of one connection."""

    def __init__(self, traffic: Traffic, link: Link, label: str, capacity: int) -> None:
        self._traffic, self._link, self.label = traffic, link, label
        self._scheduler = traffic.scheduler
        self._capacity = capacity
        self._last = 0.0
        self._on_way: deque[tuple[bytes, str]] = deque()
        self._held: list[tuple[bytes, str]] = []
        self._inbox: deque[bytes | None] = deque()
        self._readers: list[Wait] = []
        self._writers: list[Wait] = []
        self._has_ended = self.is_unread = False
        link.pipes.append(self)

    def put(self, data: bytes, text: str, deadline: float) -> bool:
        """False if the pipe has ended; TimeoutError if there is no room by the deadline."""
        while len(self._held) >= self._capacity and not self._has_ended:
            if not self._scheduler.block(self._writers, deadline):
                raise TimeoutError
        if self._has_ended:
            return False
        if self._link.is_stalled:
            self._held.append((data, text))
        else:
            self._travel(data, text)
        return True

    def repeat(self, data: bytes, text: str) -> None:
        """The same once more, at once or after a while."""

        def again() -> None:
            if not self._has_ended and not self._link.is_stalled:
                self._travel(data, text)

        seconds = self._scheduler.random.choice((0.0, 0.01, 0.5))
        self._scheduler.at(self._scheduler.now + seconds, again)

    def get(self, until: float, done: Callable[[], bool]) -> bytes | None:
        """The next frame, None after the last; TimeoutError if there is none by then."""
        scheduler = self._scheduler
        while not self._inbox:
            if scheduler.now >= until or done():
                raise TimeoutError
            glance = math.inf if done is never else scheduler.now + _GLANCE_SECONDS
            limit = min(until, glance)
            scheduler.block(self._readers, None if limit == math.inf else limit)
        return self._inbox.popleft() if self._inbox[0] is not None else None

    def resume(self) -> None:
        """What was held goes on its way."""
        held, self._held = self._held, []
        for data, text in held:
            self._travel(data, text)
        self._scheduler.wake(self._writers, len(self._writers))
        if self._has_ended:
            self._scheduler.at(self._last, self._arrive_end)

    def end(self, moment: float, *, lossy: bool) -> None:
        """Nothing more goes in; the reader sees the end then, after what is still on its way."""
        if self._has_ended:
            return
        self._has_ended = True
        self._scheduler.wake(self._writers, len(self._writers))
        if lossy:
            kept = self._scheduler.random.randint(0, len(self._on_way))
            lost = len(self._on_way) - kept + len(self._held)
            self._traffic.lost += lost
            while len(self._on_way) > kept:
                self._on_way.pop()
            self._held.clear()
        self._last = max(self._last, moment)
        self._scheduler.at(self._last, self._arrive_end)

    def drop(self) -> None:
        """Its reader is gone: what comes is late."""
        self.is_unread = True
        self._inbox.clear()
        self._inbox.append(None)
        self._scheduler.wake(self._readers, len(self._readers))

    def _travel(self, data: bytes, text: str) -> None:
        scheduler = self._scheduler
        seconds = scheduler.random.expovariate(1 / USUAL_SECONDS) * self._link.slowness
        self._last = max(self._last, scheduler.now + seconds)
        self._on_way.append((data, text))
        scheduler.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if not self._on_way:
            return  # lost with the link
        data, text = self._on_way.popleft()
        if self._link.is_stalled:
            self._held.append((data, text))
        elif self.is_unread:
            self._traffic.late += 1
            self._traffic.watcher.note("late", self.label, text)
        else:
            self._traffic.watcher.note("arrives", self.label, text)
            self._inbox.append(data)
            self._scheduler.wake(self._readers)

    def _arrive_end(self) -> None:
        if self._held or self._link.is_stalled or self not in self._link.pipes:
            return  # `resume` arranges it again; or it has been seen
        self._link.pipes.remove(self)
        if not self.is_unread:
            self._inbox.append(None)
            self._scheduler.wake(self._readers, len(self._readers))
