"""Reads the status of a worker, and answers it to its peers.

In the service lane: no function of a user keeps it from answering. A worker that does not answer is
stopped, holds the interpreter lock in C, or is gone.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import final

from gradwire.agent.requests.ends import Ends
from gradwire.agent.requests.promise import Pending
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.backward.active_pass import AnyPass, CoordinatedPass
from gradwire.autograd.graph.edges import Sent
from gradwire.current import spoken_line
from gradwire.ids import EdgeId, WorkerId
from gradwire.options import FOREVER
from gradwire.rpc.worker import Worker, serve_on_every_worker
from gradwire.seeing.stacks import stacks_of_this_process
from gradwire.seeing.status import (
    MOST_EDGES,
    MOST_LISTED,
    AskStacks,
    AskStatus,
    EdgeNow,
    PassNow,
    PeerTraffic,
    Served,
    Stacks,
    Status,
    Totals,
    Unanswered,
    clipped,
    clipped_left,
)

ASKING = "seeing"
"""the phase of a request that asks for a status: it is not listed as one that waits"""
_ANSWER_SECONDS = 2.0
_STATM = Path("/proc/self/statm")


@final
class StatusReading:
    """The status of one worker; `worker.part(StatusReading)`."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._agent = worker, worker.agent
        self._name, self._clock = worker.directory.name, worker.agent.clock
        self._agent.kinds.add(Status)
        self._agent.kinds.add(Stacks)
        self._agent.handle(AskStatus, self._serve_status, Lane.SERVICE)
        self._agent.handle(AskStacks, self._serve_stacks, Lane.SERVICE)

    def now(self) -> Status:
        """The status at this moment."""
        worker, agent, now = self._worker, self._agent, self._clock.now()
        waiting = [each for each in agent.unanswered() if each.phase != ASKING]
        served = list(agent.dispatch.inbound_requests)
        served.sort(key=lambda source: (not source.began, source.began))  # queued ones last
        passes = sorted(worker.engine.passes.all(), key=lambda active: active.began)
        sent, references = worker.engine.edges.sent.copy(), worker.refs.statistics()
        return Status(
            clipped(worker.name),
            worker.directory.myself.incarnation,
            os.getpid(),
            worker.has_program,
            threading.active_count(),
            resident_bytes(),
            Totals(
                _ended(agent.ends),
                _ended(agent.dispatch.served),
                _failed(agent.ends),
                in_flight=len(waiting),
                served_now=len(served),
                passes=len(passes),
                edges=len(sent),
                contexts=len(worker.engine.contexts),
                references=references.shared + references.held,
            ),
            [self._in_flight(each, now) for each in waiting[:MOST_LISTED]],
            [self._served(each) for each in served[:MOST_LISTED]],
            [self._pass(each, now) for each in passes[:MOST_LISTED]],
            [self._edge(each, now) for each in islice(sent.values(), MOST_EDGES)],
            self._traffic(),
        )

    def _serve_status(self, _: AskStatus, __: Payload, source: Source) -> None:
        self._agent.answer(source, self.now(), deadline=self._clock.now() + _ANSWER_SECONDS)

    def _serve_stacks(self, _: AskStacks, __: Payload, source: Source) -> None:
        text = stacks_of_this_process()
        self._agent.answer(source, Stacks(text), deadline=self._clock.now() + _ANSWER_SECONDS)

    def _traffic(self) -> list[PeerTraffic]:
        """With the peers with which most was exchanged."""
        sent: Counter[WorkerId] = Counter()
        received: Counter[WorkerId] = Counter()
        by_socket = self._agent.connections.traffic().items()
        by_device = self._worker.devices.carried().items()
        for peer, both in [*((peer, both) for (peer, _), both in by_socket), *by_device]:
            sent[peer] += both[0]
            received[peer] += both[1]
        silences = self._agent.silences()
        rows = [
            PeerTraffic(clipped(self._name(peer)), out, received[peer], silences.get(peer, 0.0))
            for peer, out in sent.items()
            if peer != self._agent.directory.me.id
        ]
        rows.sort(key=lambda row: -row.sent_bytes - row.received_bytes)
        return rows[:MOST_LISTED]

    def _in_flight(self, request: Pending, now: float) -> Unanswered:
        inbound: Source | None = request.inbound
        made_for = None
        if inbound is not None and inbound.request:
            made_for = clipped(self._name(inbound.worker)), inbound.request
        return Unanswered(
            clipped(self._name(request.peer)),
            request.n,
            clipped(request.description),
            max(0.0, now - request.opened),
            min(float(request.deadline) - now, FOREVER),
            made_for,
        )

    def _served(self, source: Source) -> Served:
        about = source.about
        what = getattr(about, "__name__", "") if isinstance(about, type) else str(about or "")
        age = max(0.0, time.monotonic() - source.began) if source.began else None
        return Served(clipped(self._name(source.worker)), source.request, clipped(what), age)

    def _pass(self, active: AnyPass, now: float) -> PassNow:
        awaited, not_done = active.waits_for()
        if isinstance(active, CoordinatedPass):
            runs, not_done = True, not_done if active.is_finishing else []
        else:
            runs, not_done = active.is_running(), []
        return PassNow(
            str(active.id),
            clipped(self._name(active.id.worker)),
            runs,
            max(0.0, now - active.began),
            min(active.deadline - now, FOREVER),
            [(str(edge), self._sender_of(edge)) for edge in awaited[:MOST_LISTED]],
            [clipped(self._name(worker)) for worker in not_done[:MOST_LISTED]],
        )

    def _sender_of(self, edge: EdgeId) -> str:
        """Whose gradients settle an edge of ours: those of the worker it leads to."""
        sent = self._worker.engine.edges.sent.get(edge.n)
        return "" if sent is None else clipped(self._name(sent.peer))

    def _edge(self, sent: Sent, now: float) -> EdgeNow:
        line = spoken_line(sent.line) or "a result"
        to, age = clipped(self._name(sent.peer)), max(0.0, now - sent.made_at)
        return EdgeNow(str(sent.edge), to, age, sent.bytes, clipped_left(line))


def _ended(ends: Ends) -> int:
    return sum(sum(tally.values()) for tally in ends.seen().values())


def _failed(ends: Ends) -> int:
    """Those that have raised, each way."""
    return sum(sum(tally.values()) for how, tally in ends.seen().items() if how != "answered")


def resident_bytes() -> int:
    """The memory of this process that is not swapped out."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0
    return pages * resource.getpagesize()


serve_on_every_worker(StatusReading)
