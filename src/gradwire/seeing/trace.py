"""`gradwire.trace`: what all workers did inside a block, as one file and ten lines of text.

The worker that traces asks every worker to record, and takes what they recorded at the end:

    recording.py        each worker: records, answers
    clocks.py           whose clock is how far ahead
    timeline.py         one timeline of all, with arrows for what crossed
    critical_path.py    what the time went for
    summary.py          the text;  perfetto.py: the file
"""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast, final

import msgspec

from gradwire.agent.agent import Answer, Outcome
from gradwire.agent.peers.directory import WorkerInfo
from gradwire.current import current_worker
from gradwire.errors import BadMessage, GradwireError, UsageError
from gradwire.ids import WorkerId
from gradwire.options import trace_from_environment
from gradwire.rpc.worker import Worker, serve_on_every_worker
from gradwire.seeing import clocks
from gradwire.seeing.archive import Profile, archive, write_tar
from gradwire.seeing.critical_path import Part, critical_path
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
from gradwire.seeing.perfetto import perfetto
from gradwire.seeing.recording import Recorder
from gradwire.seeing.summary import summary
from gradwire.seeing.timeline import Log, Timeline, timeline_of
from gradwire.torch_private import is_profiled
from gradwire.torch_private import span as torch_span
from gradwire.wire.message import Message

_SECONDS = 30.0
"""for the other workers to begin, and to send what they have"""
_READINGS = 8
_ENDINGS: Final = (".json", ".json.gz")
_WITH_TORCH: Final = (".tar",)
_numbers = count(1)
_decode = msgspec.msgpack.Decoder(list[Event]).decode
M = TypeVar("M", bound=Message)
serve_on_every_worker(Recorder)


@final
class Trace:
    """What all workers did inside a `with` block; made by `gradwire.trace`."""

    def __init__(
        self, file: Path | None, *, show: bool, torch: bool, thread: int | None = None
    ) -> None:
        self.file, self._torch = file, torch
        self.text = ""
        """where the time went, once the block is over"""
        self.timeline: Timeline | None = None
        """everything, as Python objects, once the block is over"""
        self.path: list[Part] = []
        """the critical path"""
        self.missing: dict[str, str] = {}
        """workers whose events are not there, and why"""
        self._show, self._number = show, next(_numbers)
        self._worker: Worker = cast(Worker, current_worker.find())
        self._asked: dict[WorkerId, _Asked] = {}
        self._began, self._thread = 0.0, thread or 0

    def __repr__(self) -> str:
        return self.text or "<gradwire.trace, not over>"

    def __enter__(self) -> Self:
        message, everyone = Record(self._number, self._torch), self._worker.directory.all()
        began = self._ask_all(lambda _: message, NowRecording, everyone)
        for info, answer in began.items():
            self._asked[info.id] = _Asked(info, answer)
        self._read_clocks(first=True)
        self._thread, self._began = self._thread or get_ident(), self._worker.agent.clock.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        ended = self._worker.agent.clock.now()
        self._read_clocks(first=False)
        logs = self._take()
        profiles = self._take_profiles() if self._torch else {}
        if self._worker.name in {log.worker for log in logs}:
            self._make(logs, ended, profiles)
        else:
            self.text = "no trace"
        for name, why in self.missing.items():
            self.text += f"\n no events of {name}: {why}"
        if self._show:
            print(self.text, file=sys.stderr)

    def _make(self, logs: list[Log], ended: float, profiles: dict[str, Profile]) -> None:
        root = self._worker.name, self._thread
        self.timeline = timeline_of(logs, self._began, ended, root)
        self.path = critical_path(self.timeline)
        if self.file is not None:
            if self.file.suffix == ".tar":
                write_tar(self.file, archive(self.compressed(), profiles, self._began))
            elif self.file.suffix == ".gz":
                self.file.write_bytes(self.compressed())
            else:
                self.file.write_bytes(self._content())
        self.text = summary(self.timeline, self.path, str(self.file or ""))

    def compressed(self) -> bytes:
        """The content of a `.json.gz` file, once the block is over."""
        return gzip.compress(self._content(), 5)

    def _content(self) -> bytes:
        assert self.timeline is not None, "the block is over, and this worker was not closed in it"
        return msgspec.json.encode(perfetto(self.timeline, self.path))

    # -- asking the workers

    def _ask_all(
        self, message: Callable[[WorkerInfo], Message], kind: type[M], asked: Iterable[WorkerInfo]
    ) -> dict[WorkerInfo, tuple[M, memoryview | None]]:
        """Ask them at once; those that do not answer are `missing` from then on."""
        agent, sent = self._worker.agent, {}
        deadline = agent.clock.now() + _SECONDS
        for info in asked:
            try:
                what = "gradwire.trace"
                _, promise = agent.request(
                    info.id, message(info), deadline=deadline, description=what
                )
                sent[info] = promise
            except GradwireError as error:
                self._gone(info, error)
        answers = {}
        for info, promise in sent.items():
            try:
                answers[info] = _checked(agent.wait_for(info.id, promise), kind)
            except GradwireError as error:
                self._gone(info, error)
        return answers

    def _gone(self, info: WorkerInfo, error: Exception) -> None:
        self.missing[info.name] = str(error).partition("\n")[0]
        self._asked.pop(info.id, None)

    def _read_clocks(self, *, first: bool) -> None:
        """Of the workers that have another clock."""
        mine = self._asked.get(self._worker.directory.me.id)
        here = mine.about.machine if mine else ""
        clock = self._worker.agent.clock
        for asked in list(self._asked.values()):
            if here and asked.about.machine == here:
                continue
            readings = []
            for _ in range(_READINGS):
                sent = clock.now()
                answer = self._ask_all(lambda _: ReadClock(), ClockRead, [asked.info])
                if not answer:
                    break
                ((read, _),) = answer.values()
                readings.append(clocks.Reading(sent, read.now, clock.now()))
            if readings:
                offset = clocks.estimate(readings)
                offsets = asked.offsets
                last = offset if not first else offsets.last
                asked.offsets = clocks.Offsets(offset if first else offsets.first, last)

    def _take(self) -> list[Log]:
        """What every worker recorded."""
        left = {asked.info: asked for asked in self._asked.values()}
        while left:
            answers = self._ask_all(lambda _: Take(self._number), EventsTaken, list(left))
            for info in list(left):
                if info not in answers or not left[info].add(*answers[info]):
                    del left[info]
        return [asked.log() for asked in self._asked.values()]

    def _take_profiles(self) -> dict[str, Profile]:
        """What torch's profiler has written on each worker, one after another: it is large."""
        found: dict[str, Profile] = {}
        for asked in [each for each in self._asked.values() if each.about.profiles]:
            content, name = bytearray(), asked.info.name
            while True:
                ask = partial(TakeProfile, self._number, len(content))
                answer = self._ask_all(lambda _, ask=ask: ask(), ProfilePart, [asked.info])  # type: ignore[misc]
                if not answer:
                    break
                ((part, payload),) = answer.values()
                content += payload or b""
                if part.failure or not payload:
                    self.missing[name] = part.failure or "torch's profile is empty"
                    break
                if len(content) >= part.total:
                    ahead = part.ahead - round(asked.offsets.last.seconds * 1e9)
                    found[name] = Profile(bytes(content), ahead)
                    break
        return found


@final
class _Asked:
    """What is known of one worker."""

    def __init__(self, info: WorkerInfo, answer: tuple[NowRecording, object]) -> None:
        self.info, (self.about, _) = info, answer
        self.dropped = 0
        self.offsets = clocks.SAME_CLOCK
        self._events: list[Event] = []
        self._threads: dict[int, str] = {}
        self._ways: dict[str, str] = {}

    def add(self, taken: EventsTaken, payload: memoryview | None) -> bool:
        """Take a part of its events; whether there are more."""
        try:
            events = _decode(payload or b"\x90")
        except msgspec.MsgspecError as error:
            raise BadMessage(f"the events of {self.info.name} do not decode: {error}") from error
        self._events += events
        self.dropped += taken.dropped
        self._threads |= taken.threads
        self._ways = taken.ways
        return taken.more and bool(events)

    def log(self) -> Log:
        """All of it."""
        about = f"{self.about.host}, process {self.about.pid}"
        rest = self._threads, self.offsets, self.dropped, about, self._ways
        return Log(self.info.name, self.info.id, self._events, *rest)


def _checked(outcome: Outcome, kind: type[M]) -> tuple[M, memoryview | None]:
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Answer)
    if not isinstance(outcome.message, kind):
        raise BadMessage(f"{type(outcome.message).__name__} is no answer to a trace")
    return outcome.message, outcome.payload


def trace(file: str | Path | None = None, *, show: bool = True, torch: bool = False) -> Trace:
    """Record what all workers do inside a `with` block.

    `file` (`.json` or `.json.gz`) opens at ui.perfetto.dev: threads of all workers, an arrow for
    everything that crossed, and the critical path. At the end about ten lines say where the time
    went: on standard error if `show`, and as `.text`.

    With `torch`, torch's profiler runs on every worker too, and `file` is a `.tar` with all of it,
    which Perfetto (version 58 or newer) opens as one timeline.

    >>> with gradwire.trace("step.json.gz") as t:
    ...     train_one_step()
    """
    path = None if file is None else Path(file)
    endings = _WITH_TORCH if torch else _ENDINGS
    if (path is not None or torch) and not (path and path.name.endswith(endings)):
        asked = "with torch=True" if torch else "alone"
        raise UsageError(
            f"a trace {asked} is not written to {path.name if path else None!r}",
            hint=f"name a {' or a '.join(endings)} file",
        )
    return Trace(path, show=show, torch=torch)


def trace_of_program(worker: Worker) -> Trace:
    """A trace for somebody who looks on: the path is that of the main thread."""
    with worker.scope():
        return Trace(None, show=False, torch=False, thread=threading.main_thread().ident)


def traced_if_asked() -> AbstractContextManager[object]:
    """A trace into the file that the environment names, if it names one."""
    file = trace_from_environment()
    return nullcontext() if file is None else trace(file)


@final
class Span:
    """A part of the user's program with a name, in traces and in torch's profiles."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._record: Any = None
        self._inner: AbstractContextManager[Any] | None = None
        self._began = 0.0

    def __enter__(self) -> None:
        worker = current_worker.maybe_find()
        self._record = record = None if worker is None else worker.events.record
        if record is not None:
            self._began = worker.events.now()
        if is_profiled():
            self._inner = torch_span("%s", self._name)
            self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        if self._inner is not None:
            self._inner.__exit__(*error)
        if self._record is not None:
            self._record("span", self._began, "", None, self._name)


def span(name: str) -> Span:
    """Name a part of a program: it is a slice of its own in traces.

    >>> with gradwire.span("loader"):
    ...     batch = next(batches)
    """
    return Span(name)
