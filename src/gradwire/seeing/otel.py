"""Spans for OpenTelemetry: a call that is made inside a span is its child, also on the callee.

    gradwire.otel.enable()          # on each worker that is to make spans

Nothing happens on a worker that has not called it: a library that imports opentelemetry must not
change what a program sends. Then a call, a pass or a step has a span if one is current where it
begins; a call carries its traceparent to the callee, whose span is its child if that is enabled
there, too. Spans hold names, numbers and bytes, and of an error its type: never values.

A pass has many parents in the other workers, and a trace is a tree. So it is one span, on the
worker where it began, with the participants as an attribute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, final

import torch

from gradwire.agent.serving.peer_limits import EACH
from gradwire.agent.serving.thread_pool import ElasticPool
from gradwire.autograd.backward.active_pass import CoordinatedPass
from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.rpc.calls.client import SentCall, display_name
from gradwire.rpc.expose.async_execution import Later
from gradwire.rpc.messages import Call
from gradwire.rpc.worker import Worker
from gradwire.seeing.observer import CallObserver, End, Run

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        Span,
        SpanContext,
        SpanKind,
        StatusCode,
        TraceFlags,
        TracerProvider,
    )
except ImportError as missing:
    raise UsageError(
        "gradwire.otel needs the library opentelemetry-api",
        hint="pip install 'gradwire[otel]', and an SDK to export with",
    ) from missing

__all__ = ["disable", "enable"]


def enable(tracer_provider: TracerProvider | None = None) -> None:
    """Make spans for the current worker, by this provider or the one of opentelemetry."""
    worker = cast(Worker, current_worker.find())
    worker.part(CallObserver).watch_spans(WorkerSpans(worker, tracer_provider))


def disable() -> None:
    """Make no more spans for the current worker."""
    cast(Worker, current_worker.find()).part(CallObserver).watch_spans(None)


def as_traceparent(context: SpanContext) -> str:
    """The text that names a span to another process (W3C Trace Context, version 00)."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def as_parent(traceparent: str) -> Context:
    """What begins a child of that span. The form was checked when the message was decoded."""
    _, trace_id, span_id, flags = traceparent.split("-")
    known = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(NonRecordingSpan(known))


@final
class WorkerSpans:
    """The spans of one worker; see `gradwire.seeing.observer.Spans`.

    The end of a span runs the program's exporters, which may block: so spans end on the service
    pool, with the time at which they have ended.
    """

    def __init__(self, worker: Worker, provider: TracerProvider | None) -> None:
        self._name, self._directory = worker.name, worker.directory
        self._pool: ElasticPool = worker.agent.dispatch.service
        self._tracer = trace.get_tracer("gradwire", tracer_provider=provider)

    def call(self, sent: SentCall) -> tuple[str, End] | None:
        """See `Spans.call`."""
        if not _is_current():
            return None
        function = sent.description
        about = {
            **_method(function),
            "gradwire.worker": self._name,
            "gradwire.peer": self._directory.name(sent.peer),
            "gradwire.sent.bytes": sent.size - EACH,
        }
        span = self._begin(f"gradwire/{function}", SpanKind.CLIENT, about)
        return as_traceparent(span.get_span_context()), partial(self._end, span)

    def serving(self, call: Call, run: Run) -> Run:
        """See `Spans.serving`."""
        assert call.traceparent is not None
        function, parent = display_name(call.function), as_parent(call.traceparent)

        def run_in_span(*args: object) -> object:
            about = {**_method(function), "gradwire.worker": self._name}
            span = self._begin(f"gradwire/{function}", SpanKind.SERVER, about, parent)
            value: object = None
            try:
                with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                    value = run(*args)
            except BaseException as error:
                self._end(span, type(error).__name__)
                raise
            if isinstance(value, Later):  # it ends when the future does
                value.future.add_done_callback(lambda future: self._end(span, _failure(future)))
            else:
                self._end(span, "")
            return value

        return run_in_span

    def backward(self, active: CoordinatedPass) -> End | None:
        """See `Spans.backward`."""
        if not _is_current():
            return None
        about = {
            "gradwire.worker": self._name,
            "gradwire.pass": str(active),
            "gradwire.participants": sorted(map(self._directory.name, active.participants)),
        }
        return partial(self._end, self._begin("gradwire/backward", SpanKind.INTERNAL, about))

    @contextmanager
    def step(self, id: object, owners: list[str]) -> Iterator[None]:
        """See `Spans.step`."""
        if not _is_current():
            yield
            return
        about = {
            "gradwire.worker": self._name,
            "gradwire.step": str(id),
            "gradwire.participants": sorted(owners),
        }
        span = self._begin("gradwire/step", SpanKind.INTERNAL, about)
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            self._end(span, type(error).__name__)
            raise
        self._end(span, "")

    def _begin(
        self,
        name: str,
        kind: SpanKind,
        about: Mapping[str, object],
        parent: Context | None = None,
    ) -> Span:
        return self._tracer.start_span(name, context=parent, kind=kind, attributes=about)

    def _end(self, span: Span, failure: str) -> None:
        """End it now, as the type of an error says; the exporters run on another thread."""
        if not span.is_recording():
            return
        if failure:
            span.set_attribute("error.type", failure)
            span.set_status(StatusCode.ERROR)
        self._pool.submit_or_run(partial(span.end, time.time_ns()))


def _is_current() -> bool:
    return bool(trace.get_current_span().get_span_context().is_valid)


def _method(function: str) -> Mapping[str, object]:
    return {"rpc.system.name": "gradwire", "rpc.method": function}


def _failure(future: torch.futures.Future[Any]) -> str:
    """The type of the error of a future that is done, or ""."""
    try:
        future.value()
    except BaseException as error:
        return type(error).__name__
    return ""
