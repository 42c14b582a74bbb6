"""Telling others that a context is closed, and again if it did not leave.

A peer that is lost drops its contexts by itself; one that was too slow to take the message must
still hear it, or it would keep the graph for ever.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import final

from gradwire.agent.agent import Agent
from gradwire.autograd.messages import Forget
from gradwire.errors import GradwireError, UsageError
from gradwire.ids import WorkerId, spoken_context

_SECONDS = 10.0
_AT_ONCE_SECONDS = 1.0
"""The same for the first try, on the thread of whoever closes the context: it does not wait long
for a peer that cannot be reached. The next tries have threads of their own."""
_FIRST_AGAIN_SECONDS = 0.25
_TIMES = 10


@final
class Forgetting:
    """What one worker has to say about contexts that are closed."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._later: list[tuple[float, WorkerId, Forget, int]] = []
        agent.timer.watch(self._expire)

    def tell(self, worker: WorkerId, said: Forget, tried: int = 0) -> None:
        """Tell it now, or later if that fails."""
        try:
            limit = self._agent.clock.now() + (_SECONDS if tried else _AT_ONCE_SECONDS)
            self._agent.tell(worker, said, deadline=limit)
        except UsageError:  # this worker has shut down
            return
        except GradwireError:
            self._agent.events.emit("unforgotten", spoken_context(said.context))
            if tried < _TIMES:
                self._tell_later(worker, said, tried + 1)

    def _tell_later(self, worker: WorkerId, said: Forget, tried: int) -> None:
        when = self._agent.clock.now() + _FIRST_AGAIN_SECONDS * 2 ** (tried - 1)
        with self._lock:
            self._later.append((when, worker, said, tried))
        self._agent.timer.need(when)

    def _expire(self, now: float) -> float | None:
        with self._lock:
            due = [entry for entry in self._later if entry[0] <= now]
            self._later = [entry for entry in self._later if entry[0] > now]
            following = min((entry[0] for entry in self._later), default=None)
        for _, worker, said, tried in due:
            self._agent.dispatch.service.submit(partial(self.tell, worker, said, tried))
        return following
