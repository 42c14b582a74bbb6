"""What a worker runs for others, recorded: for one caller, or for profiles of all it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import copy
from threading import Lock
from typing import Any, NamedTuple, final

from torch.autograd.profiler_util import FunctionEvent, Interval

from gradwire.compat.profiles.events import RemoteEvent
from gradwire.compat.profiles.recording import ThreadProfile, Wishes
from gradwire.errors import UsageError
from gradwire.rpc.worker import Worker
from gradwire.torch_private import is_thread_profiled

_log = logging.getLogger("gradwire")


class OpenProfile(NamedTuple):
    """A profile that is on: what it records, since when, and the events of each function so far."""

    wishes: Wishes
    began: int
    found: list[list[FunctionEvent]]


@final
class ServedProfiles:
    """The profiles that are on for all that one worker serves."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._lock = worker, Lock()
        self._open: dict[int, OpenProfile] = {}

    def open(self, profile: object, wishes: Wishes, around: Callable[..., object]) -> None:
        """From now on each function is run by `around`, and adds its events."""
        with self._lock:
            self._open[id(profile)] = OpenProfile(wishes, time.monotonic_ns(), [])
            self._worker.server.around = around

    def close(self, profile: object) -> list[list[FunctionEvent]]:
        """The events of each function that has been run; no more come."""
        with self._lock:
            closed = self._open.pop(id(profile), None)
            if not self._open:
                self._worker.server.around = None
        if closed is None:
            raise UsageError(
                "this profile is not on", hint="leave it on the worker on which it was entered"
            )
        return closed.found

    def beside(self, wishes: Wishes) -> Wishes:
        """What to record for these wishes and for the profiles that are on."""
        with self._lock:
            every = [wishes, *(profile.wishes for profile in self._open.values())]
        return Wishes(*map(any, zip(*every, strict=True)))

    def ran(self, recording: ThreadProfile, events: list[FunctionEvent]) -> None:
        """Give the events of a function to each profile that is on."""
        with self._lock:
            for _, began, found in self._open.values():
                late = (recording.began - began) / 1e3
                found.append([_later_by(late, event) for event in events])


def _later_by(us: float, event: FunctionEvent) -> FunctionEvent:
    """The same event in another profile, which began earlier; torch links the events of each."""
    made: FunctionEvent = copy(event)
    span: Any = event.time_range
    made.time_range, made.cpu_children = Interval(span.start + us, span.end + us), []  # type: ignore[no-untyped-call]
    return made


class Ran(NamedTuple):
    """A function that was run: what it returned, and what tells of it so far."""

    value: object
    told: Callable[[], list[RemoteEvent]]


def run_recorded(
    worker: Worker, wishes: Wishes, function: Callable[..., object], *args: object, **kwargs: object
) -> Ran:
    """Run a function and record this thread.

    A thread can have only one profile. On one that has another already, such as that of a caller
    who runs a function of its own, that one shows what the function does.
    """
    if is_thread_profiled():
        return Ran(function(*args, **kwargs), list)
    served, events = worker.part(ServedProfiles), list[FunctionEvent]()
    recording = ThreadProfile(served.beside(wishes))
    recording.begin()
    try:
        value = function(*args, **kwargs)
    finally:
        try:
            events = recording.end(worker.directory.me.id)
        except Exception:  # torch's parser gives up on ranges that were not closed
            _log.warning("the events of a profiled function could not be read", exc_info=True)
        served.ran(recording, events)
    return Ran(value, lambda: recording.told(events))
