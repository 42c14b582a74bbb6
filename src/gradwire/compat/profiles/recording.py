"""What torch's legacy profiler records on this thread, and what the calls made on it bring back.

torch's agent adds the events of peers to the profiler's own, in C++. Here they are added when the
profile ends, to the same list. A profile knows nothing of the calls of other threads.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, final

from torch.autograd.profiler_util import FunctionEvent

from gradwire.compat.profiles.events import (
    CallBounds,
    RemoteEvent,
    ahead,
    moved,
    named_after,
    unpack_events,
)
from gradwire.ids import WorkerId
from gradwire.torch_private import legacy_events, legacy_profiler_config, start_legacy_profiler

Clock = Callable[[], int]


class Wishes(NamedTuple):
    """What a profile records besides times."""

    shapes: bool = False
    memory: bool = False
    flops: bool = False


@final
class NotedCall:
    """A call that a profiled thread made, and what came back."""

    __slots__ = ("_clock", "began", "ended", "events", "key", "to")

    def __init__(self, key: str, to: WorkerId, clock: Clock) -> None:
        self.key, self.to, self.began, self._clock = key, to, clock(), clock
        self.ended: int | None = None
        self.events: Sequence[RemoteEvent] = ()

    def answered(self, data: object) -> None:
        """Take the events of the function that has run."""
        events = [named_after(self.key, event) for event in unpack_events(data)]
        self.events, self.ended = events, self._clock()

    @property
    def bounds(self) -> CallBounds | None:
        """The bounds of the clocks of both, if something was recorded there."""
        if self.ended is None or not self.events:
            return None
        first = min(event.start for event in self.events)
        return CallBounds(self.began, self.ended, first, max(event.end for event in self.events))


_recording: ContextVar[ThreadProfile | None] = ContextVar("gradwire recording", default=None)


def maybe_recording() -> ThreadProfile | None:
    """What this thread records now, if a profile that takes the events of peers is on."""
    return _recording.get()


@final
class ThreadProfile:
    """One profile of the thread that began it. hot: only while a profiler is on"""

    def __init__(self, wishes: Wishes, clock: Clock = time.monotonic_ns) -> None:
        self.wishes, self._clock, self.calls = wishes, clock, list[NotedCall]()
        self._outer: Token[ThreadProfile | None] | None = None
        self.began = 0

    def begin(self, config: Any = None) -> None:  # noqa: ANN401
        """Turn the profiler on, for this thread."""
        self.began = self._clock()
        start_legacy_profiler(config or legacy_profiler_config(*self.wishes))
        self._outer = _recording.set(self)

    def end(self, node: int) -> list[FunctionEvent]:
        """Turn it off; what happened on this worker."""
        assert self._outer is not None, "it was begun"
        try:
            events = legacy_events()
        finally:
            _recording.reset(self._outer)
        for event in events:
            event.node_id = node
        self._lengthen(events)
        return events

    def calling(self, key: str, to: WorkerId) -> NotedCall:
        """Note that a call begins."""
        noted = NotedCall(key, to, self._clock)
        self.calls.append(noted)
        return noted

    def _lengthen(self, events: list[FunctionEvent]) -> None:
        """Let the range of a call end when it was answered. The n-th of a name is the n-th call."""
        ranges = defaultdict[str, list[FunctionEvent]](list)
        for event in events:
            ranges[event.name].append(event)
        for call in self.calls:
            if ranges[call.key]:
                event = ranges[call.key].pop(0)
                end = 0.0 if call.ended is None else (call.ended - self.began) / 1e3
                if end > event.time_range.end and not call.key.startswith("rpc_sync"):
                    event.time_range.end, event.is_async = end, True

    def of_peers(self) -> list[RemoteEvent]:
        """What the calls brought back, on the clock of this worker."""
        answered = [(call, bounds) for call in self.calls if (bounds := call.bounds) is not None]
        of_worker = defaultdict[WorkerId, list[CallBounds]](list)
        for call, bounds in answered:
            of_worker[call.to].append(bounds)
        offsets = {to: ahead(bounds) for to, bounds in of_worker.items()}
        found = []
        for call, bounds in answered:
            offset = offsets[call.to]
            if offset is None:  # its clock drifts
                offset = ahead([bounds]) or 0
            found += [moved(event, offset) for event in call.events]
        return found

    def all_events(self, node: int) -> list[FunctionEvent]:
        """Turn it off; what happened here and on the workers that were called, in order."""
        events = self.end(node)
        events += [self._shown(event, node) for event in self.of_peers()]
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return events

    def told(self, events: Sequence[FunctionEvent]) -> list[RemoteEvent]:
        """The events of this worker, and of those that it called, as they travel."""
        return [*(remote_from(event, self.began) for event in events), *self.of_peers()]

    def _shown(self, event: RemoteEvent, me: int) -> FunctionEvent:
        """An event of a peer as torch shows it in a profile of this thread."""
        return FunctionEvent(  # type: ignore[no-untyped-call]
            id=0,
            node_id=event.node,
            name=event.name,
            trace_name=event.name,
            thread=event.thread,
            start_us=(event.start - self.began) / 1e3,
            end_us=(event.end - self.began) / 1e3,
            fwd_thread=event.forward_thread,
            input_shapes=event.shapes,
            stack=[],
            scope=event.scope,
            cpu_memory_usage=event.memory,
            device_memory_usage=event.device_memory,
            is_async=event.is_async,
            is_remote=event.node != me,
            sequence_nr=event.sequence,
            is_legacy=True,
            flops=event.flops,
        )


def remote_from(event: FunctionEvent, began: int) -> RemoteEvent:
    """An event of this worker as it travels; `began` is when its times begin."""
    start = began + int(event.time_range.start * 1e3)
    shapes: Any = event.input_shapes or ()
    return RemoteEvent(
        event.name,
        event.node_id,
        event.thread,
        start,
        max(start, began + int(event.time_range.end * 1e3)),
        event.is_async,
        [list(shape) for shape in shapes],
        int(event.scope),
        event.sequence_nr,
        event.fwd_thread or 0,
        event.cpu_memory_usage,
        event.device_memory_usage,
        int(event.flops or 0),
    )
