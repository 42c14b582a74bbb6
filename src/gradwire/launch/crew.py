"""Workers that a program has started and calls as one of them: their processes, and their end.

A thread supervises them. Each worker has a RunState of its own, in which this process is the
caller: one that dies is restarted or reported, and the others go on.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import final

import msgspec

from gradwire import threads
from gradwire.agent.messages import Failure
from gradwire.agent.peers.secret import write_secret
from gradwire.agent.remote_errors import revive
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost
from gradwire.launch import child, supervise_state
from gradwire.launch.definitions import Definitions
from gradwire.launch.processes import ProcessGroup, StartMethod
from gradwire.launch.received import HAS, REFUSES
from gradwire.launch.startup_line import StartupLine
from gradwire.launch.supervise_state import CALLER, Died, Failed, Overdue, RunState
from gradwire.options import Options
from gradwire.rpc.api import Names, default_name, init_rpc, shutdown
from gradwire.rpc.codec.pickle_codec import sent_exception
from gradwire.rpc.worker import Exposed, Worker

_log = logging.getLogger("gradwire")

_WORKER = 1  # in a RunState of two
_THREAD_SECONDS = 10.0


@final
class Crew:
    """The workers w1, w2, … of this process, which is w0."""

    def __init__(
        self,
        count: int,
        options: Options,
        restarts: int,
        names: Names | None,
        start_method: StartMethod,
    ) -> None:
        called = [(names or default_name)(rank) for rank in range(count + 1)]
        self._pid, self.names, self._line = os.getpid(), called[1:], StartupLine(count)
        self._group = ProcessGroup(
            start_method, options.timeouts.join, self._line.show, imports_main=False
        )
        home = self._directory = Path(tempfile.mkdtemp(prefix="gradwire-run-"))
        made = child.worker_specs(count + 1, options, home, restarts > 0, called.__getitem__)
        self._specs = [replace(spec, gets_code=True) for spec in made]
        self._states = {rank: _state(options, restarts) for rank in range(1, count + 1)}
        self._rank_of: dict[int, int] = {}
        self._number_of: dict[int, int] = {}
        self._prepared: set[int] = set()
        self._errors: dict[int, GradwireError] = {}
        self._definitions: Definitions | None = None
        self._worker: Worker | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_here(self) -> bool:
        """Whether this process, not one that it has forked, calls them, and has not left."""
        is_own = self._worker is not None and current_worker.maybe_default() is self._worker
        return is_own and os.getpid() == self._pid

    def start(self, given: bytes, expose: Exposed) -> None:
        """Start the processes, and join them; an error of a worker is raised here."""
        (self._directory / child.ARGUMENTS).write_bytes(given)
        mine = self._specs[CALLER]
        if mine.options.secret == str(self._directory / child.SECRET):
            write_secret(self._directory / child.SECRET)
        with self._line:
            for rank in self._states:
                self._start(rank)
            while len(self._prepared) < len(self._states):
                self._supervise_once()
                if self._errors:
                    raise next(iter(self._errors.values()))
                self._line.show()
        self._thread = threads.thread(name="gradwire supervisor", target=self._supervise)
        self._thread.start()
        try:
            init_rpc(mine.name, CALLER, mine.world_size, mine.options, expose=expose)
        except (DeadlinePassed, PeerLost) as error:
            for cause in self._errors.values():
                raise cause from error
            raise
        worker = self._worker = current_worker.find()
        assert isinstance(worker, Worker)
        made = Definitions(worker, self._directory, self._states, self._tell)
        worker.name_to_call, worker.registry.name_of = made.name_to_call, made.name_of
        for rank, lost in self._errors.items():
            made.lost(rank, _as_lost(lost))
        self._definitions = made

    def stop(self, *, graceful: bool) -> None:
        """Leave together, and end the processes; none is left, nor a file. Idempotent."""
        if os.getpid() != self._pid:
            return
        for state in self._states.values():
            state.returned(time.monotonic())  # none is restarted any more
        try:
            if not graceful:  # before w0 leaves, or they would complain of its loss
                self._end_processes()
            self._leave(graceful=graceful)
        finally:
            self._end_processes()
            if self._thread is not None:
                self._thread.join(_THREAD_SECONDS)
            self._group.stop()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end_processes(self) -> None:
        self._is_over.set()
        self._group.terminate()

    def _leave(self, *, graceful: bool) -> None:
        with suppress(OSError):  # for a worker that is restarted when the others have left
            self._specs[CALLER].returned.touch()
        if self.is_here:
            try:
                shutdown(graceful=graceful)
            except DeadlinePassed as error:  # those that did not leave are ended
                _log.warning("%s", error.message)
        if graceful and self._thread is not None:
            self._thread.join(_THREAD_SECONDS)

    # -- on the thread that supervises, once it runs

    def _supervise(self) -> None:
        try:
            while not self._is_over.is_set() and not self._group.is_empty:
                self._supervise_once()
        except (OSError, GradwireError) as error:  # one could not be started again
            _log.error("workers are not supervised any more: %s", error)
            for rank, spec in enumerate(self._specs[1:], 1):
                if self._definitions is not None:
                    lost = PeerLost(f"{spec.name} is not supervised any more: {error}")
                    self._definitions.lost(rank, _as_lost(lost))

    def _supervise_once(self) -> None:
        alive = self._states.keys() - self._errors.keys()
        due = min((self._states[rank].next_deadline() for rank in alive), default=math.inf)
        for number, news in self._group.events(max(0.0, due - time.monotonic())):
            rank = self._rank_of[number]
            if isinstance(news, str):
                self._note(rank, news)
            elif died := self._states[rank].exited(_WORKER, news, time.monotonic()):
                self._restart(rank, died)
        for rank in alive:
            self._judge(rank)

    def _start(self, rank: int) -> None:
        spec = self._specs[rank]
        number = self._group.start(spec.name, child.main, spec)
        self._rank_of[number], self._number_of[rank] = rank, number

    def _restart(self, rank: int, died: Died) -> None:
        spec = self._specs[rank] = child.restarted(self._specs[rank])
        how, when = supervise_state.describe_exit(died.status), died.stage.value
        text = "%s died (%s) %s; restarted as incarnation %d"
        _log.warning(text, spec.name, how, when, spec.options.incarnation)
        if self._definitions is not None:
            self._definitions.restarted(rank)
        self._start(rank)

    def _note(self, rank: int, word: str) -> None:
        state, definitions = self._states[rank], self._definitions
        match word.split():
            case [child.BEGUN]:
                self._line.started(rank)
            case [child.PREPARED]:
                state.begun(_WORKER)
                self._line.joined(rank)
                self._prepared.add(rank)
            case [child.JOINED]:
                if definitions is not None:
                    definitions.joined(rank)
            case [child.LEFT]:
                state.left(_WORKER)
            case [child.FAILED]:
                state.failed(_WORKER, time.monotonic(), of_lost_peer=False)
            case [kind, number] if number.isdecimal() and definitions is not None:
                if kind in (HAS, REFUSES):
                    (definitions.has if kind == HAS else definitions.refused)(rank, int(number))
            case _:  # whoever runs code there may say anything
                _log.warning("%s said %.80r, which means nothing", self._specs[rank].name, word)

    def _judge(self, rank: int) -> None:
        """Report a worker that is lost for good, once."""
        verdict, name = self._states[rank].verdict(time.monotonic()), self._specs[rank].name
        both = [self._specs[CALLER].name, name]
        match verdict:
            case Died():
                error = supervise_state.death_error(verdict, both)
            case Failed():
                data = self._specs[rank].failure.read_bytes()
                error = revive(msgspec.msgpack.decode(data, type=Failure), self._type_of)
            case Overdue():
                error = supervise_state.overdue_error(verdict, both, None)
            case _:
                return
        self._errors[rank] = error
        if self._definitions is not None:
            self._definitions.lost(rank, _as_lost(error))
        if self._thread is not None and not self._is_over.is_set():
            _log.error("%s", error.message)

    def _type_of(self, name: str) -> type[BaseException] | None:
        """The exception of that name. Before a worker has joined, it has run nobody's code."""
        known = None if self._worker is None else self._worker.registry.exception_type
        return (known or sent_exception)(name)

    def _tell(self, rank: int, message: bytes) -> bool:
        return self._group.tell(self._number_of[rank], message)


def _state(options: Options, restarts: int) -> RunState:
    state = RunState(
        2,
        time.monotonic(),
        start=options.timeouts.join,
        whole=math.inf,
        leave=math.inf,
        restarts=restarts,
    )
    state.begun(CALLER)
    return state


def _as_lost(error: GradwireError) -> PeerLost:
    """A worker is no longer there, whatever the reason: what calls to it raise."""
    hint = "gradwire.stop() and gradwire.start() start all again; restarts=1 does it for each"
    return PeerLost(error.message, hint=hint)
