"""Completes the C++ futures behind the results that no thread waits for.

Code in C++ may wait for them (`torch.futures.wait_all`). To complete one runs the callbacks that
were registered in C++, which may block, so the thread that reads a channel does not do it. Nor does
a thread for each: a burst of a thousand calls would wake a thousand. One job of the service pool
completes all that are queued. If one of them blocks, the timer begins another job for the rest.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

from gradwire import threads
from gradwire.agent.agent import Agent
from gradwire.agent.serving.thread_pool import Job

_log = logging.getLogger("gradwire")
_BLOCKED_SECONDS = 0.02
"""After so long, one completion does not keep the others waiting any more."""


@final
class Completions:
    """The completions of one worker.

    It has no lock, as a finalizer may add one. Two jobs at once do no harm. A job that ends clears
    `_job` and looks at the queue once more, and `add` does so the other way round: one of them sees
    what the other has done.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._queued: deque[Job] = deque()
        self._job: object | None = None
        """the token of the job that takes from the queue; one with an older token ends"""
        self._since = 0.0
        """when that job has begun with the completion that it is at"""
        agent.timer.watch(self._look)

    def add(self, complete: Job) -> None:
        """Complete a future soon, on another thread."""
        self._queued.append(complete)
        if self._job is None:
            self._begin()

    def _begin(self) -> None:
        self._agent.dispatch.service.submit_or_run(self._new_job())

    def _new_job(self) -> Callable[[], None]:
        self._job = token = object()
        self._since = self._agent.clock.now()
        self._agent.timer.need(self._since + _BLOCKED_SECONDS)
        return partial(self._run, token)

    def _run(self, token: object) -> None:
        while self._job is token and self._queued:
            try:
                complete = self._queued.popleft()
            except IndexError:  # another job has taken it
                break
            self._since = self._agent.clock.now()
            try:
                complete()
            except BaseException:  # the others must be completed
                _log.exception("a future could not be completed")
        if self._job is token:
            self._job = None
            if self._queued:
                self._begin()

    def _look(self, now: float) -> float | None:
        """Begin another job if the current one is blocked. Called by the timer."""
        if self._job is None:
            return None
        if self._queued and now - self._since >= _BLOCKED_SECONDS:
            job = self._new_job()
            if not self._agent.dispatch.service.submit(job):  # the worker has shut down
                me = self._agent.directory.me.name
                threads.thread(f"gradwire {me} complete", job).start()
        return now + _BLOCKED_SECONDS
