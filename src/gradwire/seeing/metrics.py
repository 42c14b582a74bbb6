"""Metrics for Prometheus: a worker's counts, read when they are scraped.

    gradwire.metrics.register()          # the current worker, in prometheus_client's own registry
    prometheus_client.start_http_server(9100)

The library `prometheus_client` serves them. Several workers of a process are told apart by the
label `worker`. Labels are bounded: the peers of a job, and at most fifty functions.
"""

from __future__ import annotations

import importlib.metadata
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast, final

from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.rpc.worker import Worker
from gradwire.seeing.counters import Counts, read_counts
from gradwire.seeing.durations import Buckets
from gradwire.seeing.observer import CallObserver

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

try:
    from prometheus_client import REGISTRY, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )
except ImportError as missing:
    raise UsageError(
        "gradwire.metrics needs the library prometheus_client",
        hint="pip install 'gradwire[metrics]'",
    ) from missing

__all__ = ["exposition", "register", "unregister"]

Labels = tuple[str, ...]
Values = Iterable[tuple[Labels, float]]
Read = Callable[[Counts], Values]
Family = tuple[str, str, Labels, Read]
"""The name, the text after HELP, the labels but for `worker`, and where the values are."""

_collectors: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()
"""One for each registry, as the text of a registry may name a metric only once."""


def register(registry: CollectorRegistry | None = None) -> None:
    """Show the current worker's metrics in a registry; by default in that of prometheus_client.

    From now on the worker also measures how long calls, backward passes and steps take, which
    adds a few microseconds to each. What it counts, it has counted from the beginning.
    """
    registry = REGISTRY if registry is None else registry
    collector = _collectors.get(registry)
    if collector is None:
        collector = _collectors[registry] = Collector()
        registry.register(collector)
    collector.add(cast(Worker, current_worker.find()))


def unregister(registry: CollectorRegistry | None = None) -> None:
    """Show the current worker's metrics in this registry no more."""
    collector = _collectors.get(REGISTRY if registry is None else registry)
    if collector is not None:
        collector.remove(cast(Worker, current_worker.find()))


def exposition(worker: Worker) -> bytes:
    """The metrics of one worker, as the text that Prometheus scrapes (version 0.0.4)."""
    return cast(bytes, generate_latest(worker.part(Collector)))


@final
class Collector:
    """The metrics of some workers of this process; a registry calls `collect` for each scrape."""

    def __init__(self, worker: Worker | None = None) -> None:
        self._workers: dict[str, weakref.ref[Worker]] = {}
        if worker is not None:
            self.add(worker)

    def add(self, worker: Worker) -> None:
        """Collect from this worker, too; in place of an earlier one of its name."""
        worker.part(CallObserver).watch_durations()
        self._workers[worker.name] = weakref.ref(worker)

    def remove(self, worker: Worker) -> None:
        """Collect from this worker no more."""
        self._workers.pop(worker.name, None)

    def describe(self) -> list[Metric]:
        """Empty: a registry that is asked to know all names does not scrape when they are added."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of all workers that still exist."""
        workers = [worker for ref in self._workers.copy().values() if (worker := ref())]
        counts = [read_counts(worker) for worker in workers]
        yield _info(counts)
        for name, about, labels, read in _COUNTERS:
            counter = CounterMetricFamily(name, about, labels=("worker", *labels))
            _fill(counter, counts, read)
            yield counter
        for name, about, labels, read in _GAUGES:
            gauge = GaugeMetricFamily(name, about, labels=("worker", *labels))
            _fill(gauge, counts, read)
            yield gauge
        yield from _durations(workers)


def _info(counts: list[Counts]) -> Metric:
    version = importlib.metadata.version("gradwire")
    info = InfoMetricFamily("gradwire", "The worker.", labels=("worker",))
    for each in counts:
        info.add_metric((each.worker,), {"version": version, "life": str(each.life)})
    return info


def _fill(
    family: CounterMetricFamily | GaugeMetricFamily, counts: list[Counts], read: Read
) -> None:
    for each in counts:
        for labels, value in read(each):
            family.add_metric((each.worker, *labels), value)


def _durations(workers: list[Worker]) -> Iterator[Metric]:
    """The histograms of the workers."""
    calls = HistogramMetricFamily(
        "gradwire_call_seconds",
        "Time from sending a call to its end, by function; those after the first 50 are other.",
        labels=("worker", "function"),
    )
    passes = HistogramMetricFamily(
        "gradwire_backward_seconds",
        "Duration of backward passes that began here.",
        labels=("worker",),
    )
    steps = HistogramMetricFamily(
        "gradwire_step_seconds", "Duration of optimizer steps that began here.", labels=("worker",)
    )
    for worker in workers:
        durations = worker.part(CallObserver).watch_durations()
        for function, buckets in durations.calls().items():
            _add(calls, (worker.name, function), buckets)
        _add(passes, (worker.name,), durations.passes.seen())
        _add(steps, (worker.name,), durations.steps.seen())
    yield from (calls, passes, steps)


def _add(family: HistogramMetricFamily, labels: Labels, buckets: Buckets) -> None:
    bounds = [("+Inf" if math.isinf(top) else str(top), count) for top, count in buckets.counts]
    family.add_metric(labels, bounds, buckets.total)


def _calls(counts: Counts) -> Values:
    for direction, ends in (("out", counts.made), ("in", counts.served)):
        for outcome, by_peer in ends.items():
            for peer, count in by_peer.items():
                yield (direction, peer, outcome), count


def _one(name: str) -> Read:
    """A number of the counts."""
    return lambda counts: [((), getattr(counts, name))]


def _many(name: str) -> Read:
    """Numbers of the counts, by one label."""
    return lambda counts: [((key,), count) for key, count in getattr(counts, name).items()]


_COUNTERS: list[Family] = [
    (
        "gradwire_calls",
        "Calls that have ended, made (out) or served (in), by how they ended.",
        ("direction", "peer", "outcome"),
        _calls,
    ),
    (
        "gradwire_sent_bytes",
        "Bytes sent, before any encryption.",
        ("peer", "way"),
        lambda counts: [((each.peer, each.way), each.sent) for each in counts.traffic],
    ),
    (
        "gradwire_received_bytes",
        "Bytes received, after any decryption.",
        ("peer", "way"),
        lambda counts: [((each.peer, each.way), each.received) for each in counts.traffic],
    ),
    ("gradwire_passes", "Backward passes that began here.", ("outcome",), _many("passes")),
    ("gradwire_steps", "Optimizer steps that began here.", ("outcome",), _many("steps")),
    ("gradwire_refused", "Requests and peers that were refused.", ("why",), _many("refused")),
    ("gradwire_losses", "How often a peer was lost.", ("peer",), _many("losses")),
    (
        "gradwire_restarts",
        "How often this worker was started again.",
        (),
        lambda counts: [] if counts.restarts is None else [((), counts.restarts)],
    ),
]
_GAUGES: list[Family] = [
    ("gradwire_in_flight", "Requests without an answer.", (), _one("in_flight")),
    ("gradwire_serving", "Requests of peers that run or are queued.", (), _one("serving")),
    (
        "gradwire_oldest_wait_seconds",
        "For how long the oldest request has had no answer.",
        (),
        _one("oldest_wait"),
    ),
    ("gradwire_contexts", "Open autograd contexts.", (), _one("contexts")),
    ("gradwire_live_edges", "Sent tensors whose graph is alive.", (), _one("live_edges")),
    ("gradwire_references", "References to values of others.", (), _one("references")),
    ("gradwire_values", "Values here that references point to.", (), _one("values")),
    (
        "gradwire_shared_blocks_bytes",
        "Shared memory that was made for peers.",
        (),
        _one("shared_bytes"),
    ),
    ("gradwire_peers", "Other workers of the job.", ("state",), _many("peers")),
]
