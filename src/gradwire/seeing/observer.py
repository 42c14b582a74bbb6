"""CallObserver: passes the ends of a worker's calls, passes and steps to durations and to spans.

A worker has none until metrics.py or otel.py asks for one, so a call reads one attribute and finds
None. A call ends on the thread that reads its answer, so nothing here blocks: see `Spans`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol, final

from msgspec.structs import replace

from gradwire.agent.agent import Answer, Outcome
from gradwire.autograd.backward.active_pass import CoordinatedPass
from gradwire.ids import PassId
from gradwire.rpc.calls.client import SentCall
from gradwire.rpc.messages import Call
from gradwire.rpc.worker import Worker
from gradwire.seeing.durations import Durations

End = Callable[[str], None]
"""Ends a span: with the name of what went wrong, or with ""."""
Run = Callable[..., object]


class Spans(Protocol):
    """What makes spans; otel.py has the one there is. To end one runs no code of the user."""

    def call(self, sent: SentCall) -> tuple[str, End] | None:
        """Begin the span of a call; its traceparent and its end. None if no span is current."""

    def serving(self, call: Call, run: Run) -> Run:
        """`run` in a span, whose parent is the one that the call names."""

    def backward(self, active: CoordinatedPass) -> End | None:
        """Begin the span of a pass."""

    def step(self, id: object, owners: list[str]) -> AbstractContextManager[object]:
        """A block in the span of a step."""


@final
class CallObserver:
    """See `gradwire.events.Observer`."""

    def __init__(self, worker: Worker) -> None:
        self.durations: Durations | None = None
        self.spans: Spans | None = None
        self._events, self._clock = worker.events, worker.agent.clock
        self._passes: dict[PassId, tuple[float, End | None]] = {}

    def watch_durations(self) -> Durations:
        """Measure from now on."""
        if self.durations is None:
            self.durations = Durations()
        self._events.observer = self
        return self.durations

    def watch_spans(self, spans: Spans | None) -> None:
        """Make spans from now on; none if that is None."""
        self.spans = spans
        idle = spans is None and self.durations is None
        self._events.observer = None if idle else self

    def call_leaves(self, sent: SentCall, call: Call) -> Call:
        """Begin to measure a call; with a span, the call names it."""
        if self.spans is not None and (begun := self.spans.call(sent)) is not None:
            traceparent, sent.end_span = begun
            call = replace(call, traceparent=traceparent)
        sent.promise.on_settled(partial(self._call_ended, sent))
        return call

    def _call_ended(self, sent: SentCall, outcome: Outcome) -> None:
        if self.durations is not None:
            self.durations.call_took(sent.description, self._clock.now() - sent.opened)
        if sent.end_span is not None:
            sent.end_span("" if isinstance(outcome, Answer) else type(outcome).__name__)

    def serving(self, call: Call, run: Run) -> Run:
        """The function that runs a peer's call, in a span if spans are made here."""
        return run if self.spans is None else self.spans.serving(call, run)

    def pass_began(self, active: CoordinatedPass) -> None:
        """Begin to measure a pass."""
        end = None if self.spans is None else self.spans.backward(active)
        self._passes[active.id] = self._clock.now(), end

    def pass_ended(self, active: CoordinatedPass, error: BaseException | None) -> None:
        """A pass has ended on all workers."""
        began, end = self._passes.pop(active.id, (None, None))
        if began is not None and self.durations is not None:
            self.durations.passes.observe(self._clock.now() - began)
        if end is not None:
            end("" if error is None else type(error).__name__)

    @contextmanager
    def step(self, id: object, owners: list[str]) -> Iterator[None]:
        """Measure a step that begins here."""
        began = self._clock.now()
        try:
            with nullcontext() if self.spans is None else self.spans.step(id, owners):
                yield
        finally:
            if self.durations is not None:
                self.durations.steps.observe(self._clock.now() - began)
