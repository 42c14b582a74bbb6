"""Asks all workers for their status while somebody watches, for all that watch at once.

While nobody watches, nobody is asked. A worker is asked again when it has answered, so one that is
frozen has one request. Workers that answer are asked by one thread; those that do not, or are not
connected, by another: it may wait for each of them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import final

import msgspec

from gradwire.agent.agent import Answer, Outcome
from gradwire.agent.peers.directory import WorkerInfo
from gradwire.agent.requests.promise import Promise
from gradwire.errors import DeadlinePassed, GradwireError, UnknownWorker
from gradwire.ids import WorkerId
from gradwire.rpc.worker import Worker
from gradwire.seeing.history import History, View
from gradwire.seeing.stacks import stacks_of_this_process
from gradwire.seeing.status import AskStacks, AskStatus, Stacks, Status, clipped
from gradwire.seeing.status_reading import ASKING, StatusReading
from gradwire.seeing.trace import trace_of_program
from gradwire.threads import Threads
from gradwire.wire.message import Message

_log = logging.getLogger("gradwire")

LOOK_SECONDS = 0.25
_LOOKS_PER_VIEW = 2
_SECONDS_PER_WORKER = 0.004
"""of the time between two looks: a large world is asked less often"""
_ANSWER_SECONDS = 2.0
_REACH_SECONDS = 1.0
_WATCHED_SECONDS = 5.0
"""how long after a single question the others are still asked"""


@final
class Watcher:
    """What all workers are and do now, seen from one of them."""

    def __init__(self, worker: Worker, owned: Threads) -> None:
        self._worker, self._agent, self._clock = worker, worker.agent, worker.agent.clock
        self._reading = worker.part(StatusReading)
        count = len(worker.directory.all())
        self.period = max(LOOK_SECONDS, _SECONDS_PER_WORKER * count)
        self._history = History(self.period)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._recording = threading.RLock()
        self._viewers = 0
        self._watched_until = 0.0
        self._asked: set[WorkerId] = set()
        """those that have not answered yet"""
        self._troubled: set[WorkerId] = set()
        """those that have not answered in time, or raised"""
        self._heard: deque[tuple[WorkerId, Outcome, float]] = deque()
        self._number, self._encoded = 0, b""
        self.is_closed = False
        self._spawn = owned.spawn

    def start(self) -> None:
        """Ask as soon as somebody watches."""
        self._spawn("page look", self._look)
        self._spawn("page reach", self._reach)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Somebody watches inside the block."""
        with self._lock:
            self._viewers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._viewers -= 1

    def record(self, seconds: float) -> tuple[str, bytes] | None:
        """Trace all workers for so long: the text, and the file. None if another one is taken."""
        if not self._recording.acquire(blocking=False):
            return None
        try:
            with trace_of_program(self._worker) as trace, self._lock:
                self._changed.wait_for(lambda: self.is_closed, seconds)
            return trace.text, b"" if trace.timeline is None else trace.compressed()
        finally:
            self._recording.release()

    def view_after(self, number: int, seconds: float) -> tuple[int, bytes]:
        """The first view after this one, as JSON, with its number; the same number if none came."""
        with self._lock:
            self._watched_until = self._clock.now() + _WATCHED_SECONDS
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.is_closed or self._number > number, seconds)
            return self._number, self._encoded

    def latest(self, seconds: float) -> bytes:
        """The view of now, as JSON; the first takes a moment. Empty if there is none in time."""
        with self._lock:
            number, encoded = self._number, self._encoded
            self._watched_until = self._clock.now() + _WATCHED_SECONDS
        return encoded or self.view_after(number, seconds)[1]

    def stacks(self, name: str) -> str:
        """The stacks of a worker, or why there are none."""
        try:
            info = self._worker.directory.find(name)
            if info == self._worker.directory.me:
                return stacks_of_this_process()
            answer = self._ask(info, AskStacks(), self._clock.now() + _ANSWER_SECONDS)
            outcome = self._agent.wait_for(None, answer)
        except GradwireError as error:
            outcome = error
        if isinstance(outcome, Answer) and isinstance(outcome.message, Stacks):
            return outcome.message.text
        if isinstance(outcome, DeadlinePassed):
            return (
                f"{name} does not answer: its process is stopped, or holds the interpreter in C. "
                "Where it runs, `py-spy dump --native --pid …` may show more."
            )
        if isinstance(outcome, UnknownWorker):
            return f"There is no worker {name}."
        return f"{name} cannot be asked: {_plain(outcome)}"

    def close(self) -> None:
        """Wake every thread that waits here."""
        with self._lock:
            self.is_closed = True
            self._changed.notify_all()

    # -- the thread that looks

    def _look(self) -> None:
        try:
            self._look_while_watched()
        except Exception:  # viewers must not take an old view for the present
            _log.exception("%s: its page has failed, and ends", self._worker.name)
            self.close()

    def _look_while_watched(self) -> None:
        looks, was_asleep = 0, True
        while not self.is_closed:
            with self._lock:
                if not self._is_watched():
                    was_asleep, self._encoded = True, b""
                    self._changed.wait(_WATCHED_SECONDS)
                    continue
            now = self._clock.now()
            self._history.members((info.name for info in self._worker.directory.all()), now)
            if was_asleep:
                self._history.slept(now)
                was_asleep = False
            self._ask_those_that_answer()
            self._pause()
            self._note()
            looks += 1
            if looks % _LOOKS_PER_VIEW == 0 and self._history.is_complete(self._clock.now()):
                self._publish(self._view())

    def _pause(self) -> None:
        """Until the next look; answers come meanwhile."""
        until = self._clock.now() + self.period
        with self._lock:
            while not self.is_closed and (left := until - self._clock.now()) > 0:
                self._changed.wait(left)

    def _is_watched(self) -> bool:
        return bool(self._viewers) or self._clock.now() < self._watched_until

    def _note(self) -> None:
        """Take in what has come."""
        now, name = self._clock.now(), self._worker.directory.name
        mine = msgspec.structs.replace(self._reading.now(), worker=self._worker.name)
        self._history.heard(self._worker.name, mine, now)
        while self._heard:
            worker, outcome, at = self._heard.popleft()
            if isinstance(outcome, Answer) and isinstance(outcome.message, Status):
                # Its name is the one we know it by, whatever it says.
                status = msgspec.structs.replace(outcome.message, worker=name(worker))
                self._history.heard(name(worker), status, at)
                self._troubled.discard(worker)
            elif isinstance(outcome, Exception):
                is_late = isinstance(outcome, DeadlinePassed)  # the view says so by itself
                self._history.failed(name(worker), "" if is_late else _plain(outcome))
                self._troubled.add(worker)
        self._history.tick(now)

    def _view(self) -> View:
        program = Path(sys.argv[0]).name if sys.argv else ""
        return self._history.view(self._clock.now(), self._worker.name, os.getpid(), program)

    def _publish(self, view: View) -> None:
        encoded = msgspec.json.encode(view)
        with self._lock:
            self._number += 1
            self._encoded = encoded
            self._changed.notify_all()

    def _ask_those_that_answer(self) -> None:
        for info in self._worker.directory.others():
            id = info.id
            if id in self._asked or id in self._troubled or not self._agent.is_connected(id):
                continue
            with suppress(GradwireError):
                self._ask_status(info)

    # -- the thread that asks those that do not answer

    def _reach(self) -> None:
        while not self.is_closed:
            with self._lock:
                self._changed.wait(self.period if self._is_watched() else _WATCHED_SECONDS)
                is_watched = self._is_watched()
            for info in self._worker.directory.others() if is_watched else ():
                is_well = self._agent.is_connected(info.id) and info.id not in self._troubled
                if not (is_well or info.id in self._asked or self.is_closed):
                    with suppress(GradwireError):
                        self._ask_status(info)

    def _ask_status(self, info: WorkerInfo) -> None:
        """Ask; what the worker answers, or why it cannot be asked, is noted by the other thread."""
        self._asked.add(info.id)
        try:
            if not self._agent.is_connected(info.id):
                self._agent.reach(info.id, self._clock.now() + _REACH_SECONDS)
            answer = self._ask(info, AskStatus(), self._clock.now() + _ANSWER_SECONDS)
        except GradwireError as error:
            self._came(info.id, error)
            raise
        answer.on_settled(partial(self._came, info.id))

    def _ask(self, info: WorkerInfo, message: Message, deadline: float) -> Promise[Outcome]:
        about = "its stacks" if isinstance(message, AskStacks) else "its status"
        _, promise = self._agent.request(
            info.id, message, deadline=deadline, description=about, phase=ASKING
        )
        return promise

    def _came(self, worker: WorkerId, outcome: Outcome) -> None:
        self._heard.append((worker, outcome, self._clock.now()))
        self._asked.discard(worker)


def _plain(error: object) -> str:
    """An error as one line."""
    text = error.message if isinstance(error, GradwireError) else str(error)
    return clipped(text.partition("\n")[0])
