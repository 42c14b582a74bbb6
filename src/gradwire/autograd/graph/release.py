"""Tells the senders of edges that their Recvs are no more.

The end of a Recv only queues its edge: a finalizer must not send. What is queued for a worker rides
on the next call or answer to it, or on the end of a context, so a loop of training needs no message
for it. A tick of the timer, while there are Recvs or something is queued, sends what has found no
ride since the tick before. To be told of an edge twice does no harm, so an edge stays in the queue
until a message with it has left.

A peer that is lost needs no word, nor a connection to tell it: both sides drop the edges between
them, and an edge comes by a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.messages import Release
from gradwire.errors import DeadlinePassed, GradwireError
from gradwire.ids import WorkerId

_TICK_SECONDS = 0.05
_SECONDS = 0.5
"""How long a Release may take to leave; then it is sent again. Shutdown waits 1 s for threads."""
_MOST = 1 << 16
"""Edges in one message, if its limits allow it."""
_BYTES = 16
"""More than a number takes."""
_MOST_RIDING = 64
"""Edges on one call or answer, whose receiver drops them before it goes on."""


@final
class Releases:
    """What one worker says of edges that are over, and hears of its own."""

    def __init__(self, agent: Agent, edges: Edges) -> None:
        self._agent, self._edges = agent, edges
        limits = agent.limits
        self._most = max(1, min(_MOST, limits.head // _BYTES, limits.elements) // 2)
        self._most_riding = min(_MOST_RIDING, self._most)
        self.riding_to: Callable[[WorkerId], list[int]] = partial(
            edges.to_release, most=self._most_riding
        )
        """what a message takes along; say `rode` when it has left"""
        self._is_over = False
        self._is_expected = False
        """whether there was a Recv since the last tick: to stop the ticks of a loop of training
        between two steps would wake the timer's thread in each step that begins them again"""
        self._late: set[WorkerId] = set()
        """whom the next tick tells, unless a message takes it along before"""
        agent.handle(Release, self._serve, Lane.SERVICE)
        agent.timer.watch(self._tick)

    def expect(self) -> None:
        """There is a Recv, or something to release: look again soon. hot: each message with one"""
        timer, self._is_expected = self._agent.timer, True
        if timer.armed - self._agent.clock.now() > _TICK_SECONDS:
            timer.need(self._agent.clock.now() + _TICK_SECONDS)

    def stop(self) -> None:
        """All programs are over: nobody needs to hear anything more, and some have left."""
        self._is_over = True

    def rode(self, worker: WorkerId, edges: Sequence[int]) -> None:
        """A message with these has left."""
        self._edges.was_told(worker, edges)
        if len(edges) < self._most_riding:  # all that were queued
            self._late.discard(worker)

    def heard(self, edges: Sequence[int], by: WorkerId) -> None:
        """A message has brought these; what they held is dropped here."""
        self._edges.release(edges, by).clear()

    def _tick(self, now: float) -> float | None:
        if self._is_over:
            return None
        waiting = set(self._edges.to_tell)
        if late := waiting & self._late:
            self._agent.dispatch.service.submit(partial(self.flush, late))
        self._late = waiting - late
        goes_on, self._is_expected = self._is_expected or waiting or self._edges.has_recvs(), False
        return now + _TICK_SECONDS if goes_on else None

    def flush(self, workers: set[WorkerId] | None = None) -> None:
        """Tell these workers, or all, what is queued for them."""
        for worker in self._edges.to_tell if workers is None else workers:
            while edges := self._edges.to_release(worker, self._most):
                if not self._tell(worker, edges):
                    break

    def _tell(self, worker: WorkerId, edges: Sequence[int]) -> bool:
        """False if it is to be told later."""
        if not self._is_over and self._agent.is_connected(worker):
            deadline = self._agent.clock.now() + _SECONDS
            try:
                self._agent.tell(worker, Release(list(edges)), deadline=deadline)
            except DeadlinePassed:
                self.expect()  # the tick may have ended meanwhile
                return False
            except GradwireError:  # it is lost, or this worker shuts down
                self._agent.events.note("unreleased", worker)
        self.rode(worker, edges)
        return True

    def _serve(self, message: Release, _: Payload, source: Source) -> None:
        were_waiting = self._edges.to_tell
        self.heard(message.edges, source.worker)
        # What was dropped may have held Recvs: at once, or a chain would take two ticks a hop. Only
        # for whom nothing was queued before. In a loop of training there is always something, and
        # two workers would answer each other's Releases without end.
        if newly := set(self._edges.to_tell).difference(were_waiting):
            self.flush(newly)
