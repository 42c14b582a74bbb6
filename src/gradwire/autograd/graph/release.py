"""Tells the senders of edges that their Recvs are no more.

The end of a Recv only queues its edge: a finalizer must not send. A tick of the timer, while this
worker has any Recvs, sends what is queued, one message for each sender. What does not leave is kept
for the next tick. A peer that is lost needs no word, nor a connection to tell it: both sides drop
the edges between them, and an edge comes by a connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.messages import Release
from gradwire.errors import DeadlinePassed, GradwireError
from gradwire.ids import EdgeId, WorkerId

_TICK_SECONDS = 0.03
_SECONDS = 0.5
"""How long a Release may take to leave; then it is sent again. Shutdown waits 1 s for threads."""
_MOST = 1 << 16
"""Edges in one message."""


@final
class Releases:
    """What one worker says of edges that are over, and hears of its own."""

    def __init__(self, agent: Agent, edges: Edges) -> None:
        self._agent, self._edges = agent, edges
        self._is_over = False
        agent.handle(Release, self._serve, Lane.SERVICE)
        agent.timer.watch(self._tick)

    def expect(self) -> None:
        """There is a Recv, or something to release: look again soon. hot: each message with one"""
        timer = self._agent.timer
        if timer.armed - self._agent.clock.now() > _TICK_SECONDS:
            timer.need(self._agent.clock.now() + _TICK_SECONDS)

    def stop(self) -> None:
        """All programs are over: nobody needs to hear anything more, and some have left."""
        self._is_over = True

    def _tick(self, now: float) -> float | None:
        if self._is_over:
            return None
        if self._edges.has_died:
            self._agent.dispatch.service.submit(self.flush)
        return now + _TICK_SECONDS if self._edges.received or self._edges.has_died else None

    def flush(self) -> None:
        """Send what is queued."""
        for worker, edges in self._edges.take_dead().items():
            for first in range(0, len(edges), _MOST):
                self._tell(worker, edges[first : first + _MOST])

    def _tell(self, worker: WorkerId, edges: Sequence[int]) -> None:
        if self._is_over or not self._agent.is_connected(worker):
            return
        deadline = self._agent.clock.now() + _SECONDS
        try:
            self._agent.tell(worker, Release(list(edges)), deadline=deadline)
        except DeadlinePassed:
            self._edges.unseen([EdgeId(worker, n) for n in edges], worker)
            self.expect()  # the tick may have ended meanwhile
        except GradwireError:  # it is lost, or this worker shuts down
            self._agent.events.emit("unreleased", worker)

    def _serve(self, message: Release, _: Payload, source: Source) -> None:
        were_dead = self._edges.has_died
        self._edges.release(message.edges, source.worker).clear()
        # What was dropped may have held Recvs: at once, or a chain would take a tick for each hop.
        # Only if nothing was queued before. In a loop of training there is always something, and
        # two workers would answer each other's Releases without end.
        if self._edges.has_died and not were_dead:
            self.flush()
