"""What a worker does for those that look at it: it records, and sends what it recorded.

Any member of the world may ask. It is told names, shapes, sizes and times, and never a value.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, final

import msgspec

from gradwire.agent.agent import Agent
from gradwire.agent.requests.timer import Clock, MonotonicClock
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.errors import OverLimit, PeerLost, UsageError
from gradwire.events import Record as KeptRecord
from gradwire.ids import CallId, WorkerId
from gradwire.rpc.calls.client import display_name
from gradwire.rpc.worker import Worker
from gradwire.seeing.messages import (
    ClockRead,
    Event,
    EventsTaken,
    NowRecording,
    ProfilePart,
    ReadClock,
    Record,
    Take,
    TakeProfile,
)
from gradwire.seeing.profiles import TorchProfile, begin_profile
from gradwire.transport.near import this_machine
from gradwire.wire.tensor import DTYPES, TensorHeader

_ANSWER_SECONDS = 60.0
_EVENTS_IN_AN_ANSWER: Final = 20_000
_BYTES_IN_AN_ANSWER: Final = 8 << 20
_TRACES_OF_A_PEER = 4
_JOBS_SECONDS, _LOOK_AGAIN_SECONDS = 5.0, 0.001
_TEXT = 200
_SHAPES = 3
_NUMBERED = re.compile(r" (of|from) [a-z]\d+\.\d+$")
"""which reference it is about: events of one kind have one name"""
_OF_THE_PEER = {"serve", "answer"}
"""events whose request was numbered by the peer"""


def read(worker: Worker, records: Iterable[KeptRecord]) -> list[Event]:
    """The records of a worker, in texts and numbers."""
    directory = worker.directory
    me, names = directory.me.id, {info.id: info.name for info in directory.all()}
    return [_read(record, me, names) for record in records]


def _read(record: KeptRecord, me: WorkerId, names: dict[WorkerId, str]) -> Event:
    n, what, began, ended, thread, id, peer, about, size = record
    headers: Sequence[Any] = ()
    if type(id) is int:
        id = CallId(peer if what in _OF_THE_PEER else me, id) if id else ""
    if type(about) is tuple:
        about, headers = about
    elif type(about) is list:
        about, headers = "", about
    elif isinstance(about, type):
        about = about.__name__
    elif what == "serve":
        about = display_name(str(about))
    if headers:
        size = max(size, bytes_of(headers))
    name = peer if type(peer) is str else names.get(peer, "" if peer is None else f"w{peer}")
    about = _NUMBERED.sub("", str(about).partition("(")[0])
    texts = (about[:_TEXT], shapes_of(headers))
    return Event(n, what, began, ended, thread, str(id), name, *texts, size)


def shapes_of(headers: Sequence[TensorHeader]) -> str:
    """The dtypes and shapes of tensors.

    >>> shapes_of([TensorHeader(11, (2, 3)), TensorHeader(5, ())])
    'float32[2,3], int64[]'
    """
    shown = [f"{_dtype(h)}[{','.join(map(str, h.shape))}]" for h in headers[:_SHAPES]]
    rest = len(headers) - len(shown)
    return ", ".join([*shown, f"{rest} more"] if rest else shown)


def _dtype(header: TensorHeader) -> str:
    return str(DTYPES.get(header.dtype, "?")).removeprefix("torch.")


def bytes_of(headers: Iterable[TensorHeader]) -> int:
    """How many bytes tensors have."""
    total = 0
    for header in headers:
        size = DTYPES[header.dtype].itemsize if header.dtype in DTYPES else 0
        for length in header.shape:
            size *= length
        total += size if not header.parts else bytes_of(header.parts)
    return total


def threads_here() -> dict[int, str]:
    """The names of this process's threads."""
    return {thread.ident: thread.name for thread in threading.enumerate() if thread.ident}


_CLOCK_OF_PROCESS = Path("/proc/self/ns/time")


def machine_of(clock: Clock) -> str:
    """What is the same on all workers whose clocks are one; empty if unknown."""
    if not isinstance(clock, MonotonicClock):
        return f"{type(clock).__name__} {os.getpid()} {id(clock)}"
    try:  # a container may have a clock of its own
        return f"{this_machine()} {_CLOCK_OF_PROCESS.readlink()}" if this_machine() else ""
    except OSError:
        return ""


@final
class Recorder:
    """Records on one worker for those that ask."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._agent = worker, worker.agent
        self._lock = threading.RLock()
        self._recording: dict[tuple[WorkerId, int], int] = {}
        """by the worker that asked and its number: the number of the last event before"""
        self._ended: dict[tuple[WorkerId, int], list[KeptRecord]] = {}
        """what is still to be sent"""
        self._profiles: dict[tuple[WorkerId, int], tuple[TorchProfile, bytes | None]] = {}
        """that torch takes, and what it has written once that is over"""
        agent: Agent = self._agent
        agent.handle(Record, self._serve_record, Lane.SERVICE)
        agent.handle(ReadClock, self._serve_clock, Lane.SERVICE)
        agent.handle(Take, self._serve_take, Lane.SERVICE)
        agent.handle(TakeProfile, self._serve_profile, Lane.SERVICE)
        for answer in (NowRecording, ClockRead, EventsTaken, ProfilePart):
            agent.kinds.add(answer)
        agent.on_peer_lost(self._peer_lost)

    def _serve_record(self, message: Record, _: Payload, source: Source) -> None:
        key = source.worker, message.trace
        with self._lock:
            known = [worker for worker, _ in (*self._recording, *self._ended)]
            if known.count(source.worker) >= _TRACES_OF_A_PEER:
                raise OverLimit(
                    f"{self._agent.directory.me.name} records for {_TRACES_OF_A_PEER} traces of "
                    f"{self._agent.directory.name(source.worker)} already",
                    hint="end one of them first",
                )
            self._recording[key] = self._agent.events.watch(key)
        clock = self._agent.clock
        if message.torch:
            self._begin_profile(key)
        where = os.getpid(), machine_of(clock), socket.gethostname()
        about = NowRecording(*where, key in self._profiles)
        self._agent.answer(source, about, deadline=clock.now() + _ANSWER_SECONDS)
        try:
            self._agent.check_asker(source)
        except PeerLost:  # before it was added here
            self._end(key)
            raise

    def _serve_clock(self, _: ReadClock, __: Payload, source: Source) -> None:
        now = self._agent.clock.now()
        self._agent.answer(source, ClockRead(now), deadline=now + _ANSWER_SECONDS)

    def _serve_take(self, message: Take, _: Payload, source: Source) -> None:
        key, dropped = (source.worker, message.trace), 0
        if key in self._recording:
            self._let_jobs_end()
        with self._lock:
            first = self._recording.get(key)
            if first is not None:
                self._ended[key] = [r for r in self._agent.events.kept() if r[0] > first]
                self._end(key)
            left = self._ended.get(key)
        if left is None:
            raise UsageError(f"trace {message.trace} is not recorded here")
        if first is not None and left:
            dropped = left[0][0] - first - 1
        part, left[:_EVENTS_IN_AN_ANSWER] = left[:_EVENTS_IN_AN_ANSWER], []
        if not left:
            self._ended.pop(key, None)
        body = msgspec.msgpack.encode(read(self._worker, part))
        taken = EventsTaken(bool(left), dropped, threads_here(), self._ways())
        deadline = self._agent.clock.now() + _ANSWER_SECONDS
        self._agent.answer(source, taken, [body], deadline=deadline)

    def _begin_profile(self, key: tuple[WorkerId, int]) -> None:
        directory = self._agent.directory
        me = directory.me
        profile = begin_profile(me.name, me.id, len(directory.all()))
        if profile is not None:
            self._profiles[key] = profile, None

    def _serve_profile(self, message: TakeProfile, _: Payload, source: Source) -> None:
        key = source.worker, message.trace
        if key not in self._profiles:
            raise UsageError(f"trace {message.trace} is not profiled here")
        profile, content = self._profiles[key]
        if content is None:
            content = profile.stop()
            self._profiles[key] = profile, content
        part = content[message.start : message.start + _BYTES_IN_AN_ANSWER]
        if message.start + len(part) >= len(content):
            del self._profiles[key]
        answer = ProfilePart(len(content), profile.ahead, profile.failure)
        deadline = self._agent.clock.now() + _ANSWER_SECONDS
        self._agent.answer(source, answer, [part], deadline=deadline)

    def _let_jobs_end(self) -> None:
        """Jobs that have sent their answer are about to record that they are over."""
        dispatch, limit = self._agent.dispatch, time.monotonic() + _JOBS_SECONDS
        while time.monotonic() < limit:
            if not any(inbound.answered for inbound in list(dispatch.inbound_requests)):
                break
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _ways(self) -> dict[str, str]:
        agent, others = self._agent, self._agent.directory.others()
        links = {info.name: agent.link_to(info.id) for info in others}
        return {name: link.partition(":")[0] for name, link in links.items() if link}

    def _end(self, key: tuple[WorkerId, int]) -> None:
        with self._lock:
            if self._recording.pop(key, None) is not None:
                self._agent.events.unwatch(key)

    def _peer_lost(self, worker: WorkerId, __: PeerLost) -> None:
        for key in [*self._recording, *self._ended, *self._profiles]:
            if key[0] == worker:
                self._end(key)
                self._ended.pop(key, None)
                if key in self._profiles:
                    profile, _ = self._profiles.pop(key)
                    self._agent.dispatch.service.submit(profile.stop)
