"""Which passes of others run here: how many at once, for how long, and when they may begin.

Note [Who may have us run]: the numbers of contexts and edges can be guessed, so any member can send
a Start for a graph in which it has no part. Its run would use up the graph, or occupy a thread
while it waits for gradients that nobody sends. This worker cannot know everyone who takes part: the
peer to which it sent a tensor may have passed the result on. But the gradients of an edge come only
from the worker to which that edge leads. So a Start from a worker that is not known in the context
waits, without a thread, for the first gradients of its pass. In a correct pass they come, worker by
worker, along the edges that lead to the root, and before they come a run could do nothing but wait.
If no edge leads to the root they never come, and the deadline ends the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from gradwire.agent.agent import Agent
from gradwire.agent.serving.peer_limits import PeerLimit
from gradwire.autograd.backward.active_pass import ActivePass
from gradwire.autograd.graph.context import Context
from gradwire.errors import OverLimit
from gradwire.ids import WorkerId, opener_of

Run = Callable[[], bool]
"""Takes part in a pass. True if it is not over but was parked: then it keeps its place."""
Failed = Callable[[BaseException], None]


@final
class Admission:
    """Of one worker."""

    def __init__(self, agent: Agent, seconds: float) -> None:
        self._agent, self._seconds = agent, seconds
        self._runs = PeerLimit("runs", agent.limits.runs)

    def deadline(self, seconds: float) -> float:
        """When a pass is given up here: its root may ask for less time than we allow, not more."""
        return self._agent.clock.now() + min(seconds, self._seconds)

    def admit(self, root: WorkerId, run: Run, failed: Failed) -> None:
        """Run it, if its root does not have as many runs here as it may."""
        try:
            self._runs.take(root)
        except OverLimit as error:
            self._agent.noting.note(root, error)
            failed(error)
            return
        self._attempt(root, run, failed)

    def _attempt(self, root: WorkerId, run: Run, failed: Failed) -> None:
        is_parked = False
        try:
            is_parked = run()
        except BaseException as error:  # an error ends the pass everywhere
            failed(error)
        finally:
            if not is_parked:
                self._runs.give_back(root)

    def is_known(self, context: Context, root: WorkerId) -> bool:
        """Whether we know that it takes part in this context. hot: each pass"""
        return root == opener_of(context.id) or root in context.callers or root in context.called

    def park(self, running: ActivePass, run: Run, failed: Failed) -> bool:
        """Run it when its first gradients have come, or it has failed; False if that is so now."""
        attempt = partial(self._attempt, running.id.worker, run, failed)
        return running.park(partial(self._agent.dispatch.service.submit, attempt))
