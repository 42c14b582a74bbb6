"""Simulated workers: real ones, over simulated links, each a process that can crash and come back.

What happens is recorded as lines of text, in order.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import final

from torch.distributed import HashStore  # type: ignore[attr-defined]

from gradwire.agent.membership.open_world import RosterStore
from gradwire.agent.peers.directory import Directory, Member
from gradwire.agent.peers.refusals import Refusals
from gradwire.agent.peers.secret import Secret, SignedStore
from gradwire.agent.requests.timer import MonotonicClock
from gradwire.options import Options
from gradwire.rpc.worker import Exposed, Worker
from gradwire.seeing.messages import Event
from gradwire.testing.failpoints import kind_names
from gradwire.transport.address import Transports
from gradwire.wire.message import IS_ANSWER, Frame
from tests.hearing import LOCAL, hearing
from tests.simulate.links import SimulatedNetwork
from tests.simulate.primitives import simulated
from tests.simulate.scheduler import Process, Scheduler, Task

ANY, BACKWARD = "any", "backward"  # steps of all frames, or of those of the autograd layer

_REPEATABLE = {"Fork", "Accept", "Drop", "QueryFork", "Forget", "Release"}
"""What may come twice, as each of them says of itself. So may any answer."""

_REFUSED = re.compile(r"\w+ refused (\w+): \w+ releases ")  # a Release that no peer should send

_SECRET = Secret(b"that all workers of a world know", "a simulated world")


@dataclass(eq=False, slots=True)
class Incarnation(Process):
    """A worker from one start to its crash; `worker` is there once it has joined."""

    number: int = 1
    worker: Worker | None = None


@final
class World:
    """The workers of one history, and what happened to them; a context manager."""

    def __init__(
        self,
        seed: int,
        workers: int,
        *,
        options: Options,
        expose: Exposed = (),
        is_open: bool = False,
        capacity: int = 1 << 20,
        repeats: float = 0.0,
        most_switches: int = 200_000,
    ) -> None:
        self.scheduler = Scheduler(seed, most_switches=most_switches)
        self.network = SimulatedNetwork(self.scheduler, self, capacity)
        self.options, self.expose, self.is_open = options, tuple(expose), is_open
        self.names = [f"w{n}" for n in range(workers)]
        self.incarnations: dict[str, Incarnation] = {}
        self.counts: Counter[str] = Counter()  # how often each kind of event and fault happened
        self._steps: Counter[str] = Counter()  # frames sent and arrived, by which faults are timed
        self._at_step: dict[tuple[str, int], list[Callable[[], None]]] = {}
        self.lines: list[str] = []  # the history, as a person reads it
        self._repeats = repeats
        self._store = HashStore() if is_open else None
        self._workers: list[Worker] = []
        self.refusals: list[
            tuple[str, str]
        ] = []  # whose Releases were refused, and what was logged
        self._open = ExitStack()

    def __enter__(self) -> World:
        modules = [thing for thing in self.expose if isinstance(thing, ModuleType)]
        self._open.enter_context(simulated(modules, self._logged))
        self._open.callback(self._clear)
        self._open.callback(self.scheduler.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # -- what happened

    def note(self, what: str, where: str, text: str = "") -> None:
        """One line of it."""
        if self.scheduler.is_closed:
            return
        self.lines.append(f"{self.scheduler.now:10.6f} {where:<6} {what} {text}".rstrip())
        if what in ("arrives", "late"):
            self._step(text)

    def sent(self, frame: Frame) -> str:
        """A frame leaves; returns how traces name it."""
        kind = _kinds().get(frame.kind, f"kind {frame.kind:#x}")
        arrow = "answer" if frame.flags & IS_ANSWER else "request" if frame.request else ""
        text = f"{kind} {arrow} {frame.request or ''}".rstrip()
        self.note("sends", self.scheduler.me().process.name, text)
        self._step(text)
        return text

    def may_repeat(self, frame: Frame) -> bool:
        """Whether the protocol lets this one come twice, and it shall."""
        may = frame.flags & IS_ANSWER or _kinds().get(frame.kind) in _REPEATABLE
        if not (self._repeats and may and self.scheduler.random.random() < self._repeats):
            return False
        self.fault("repeat", self.scheduler.me().process.name)
        return True

    def fault(self, kind: str, where: str, text: str = "") -> None:
        """A fault was injected."""
        self.counts[kind] += 1
        self.note(f"*** {kind}", where, text)

    def at(self, kind: str, steps: int, act: Callable[[], None]) -> None:
        """Do this after so many more steps of a kind."""
        self._at_step.setdefault((kind, self._steps[kind] + steps), []).append(act)

    def spare(self) -> None:
        """Nothing more is done after any step."""
        self._at_step.clear()

    def _step(self, text: str) -> None:
        kinds = (ANY, BACKWARD) if text.partition(" ")[0] in _kinds_of_backward() else (ANY,)
        for kind in kinds:
            self._steps[kind] += 1
            for act in self._at_step.pop((kind, self._steps[kind]), ()):
                self.scheduler.interrupt(act)

    def _heard(self, worker: str, event: Event) -> None:
        self.counts[event.what] += 1
        if event.what not in LOCAL:
            self.note(event.what, worker, " with ".join(filter(None, (event.id, event.peer))))

    def _logged(self, record: logging.LogRecord) -> bool:
        task = self.scheduler.current
        where, text = "-" if task is None else task.process.name, record.getMessage()
        self.note("logs", where, text)
        refused = _REFUSED.match(text)
        if refused is not None:
            self.refusals.append((refused[1], text))
        return False

    # -- workers

    def start(self) -> None:
        """All of them; returns when they have joined."""
        for name in self.names:
            self.start_worker(name)
        have_joined = self.scheduler.run(60.0, self.are_all_here)
        assert have_joined, "not all workers have joined"

    def are_all_here(self) -> bool:
        """Whether all run and have joined."""
        return len(self.workers()) == len(self.names)

    def start_worker(self, name: str) -> None:
        """A worker starts, for the first time or again."""
        number = self.incarnations[name].number + 1 if name in self.incarnations else 1
        it = self.incarnations[name] = Incarnation(name, number=number)
        self.note("starts", name, f"incarnation {number}")
        self.scheduler.spawn(f"gradwire {name} start", it, partial(self._join, it))

    def crash(self, name: str, *, silent_for: float = 0.0) -> None:
        """It is gone in the middle of whatever it did."""
        process = self.incarnations[name]
        if not process.is_dead:
            self.scheduler.kill(process)
            self.network.crashed(process, silent_for=silent_for)

    def workers(self) -> dict[str, Worker]:
        """Those that run and have joined."""
        return {
            name: it.worker
            for name, it in self.incarnations.items()
            if it.worker is not None and not it.is_dead
        }

    def run_as(self, name: str, what: str, target: Callable[[], None]) -> Task:
        """Start a thread of the user's in a worker."""
        it = self.incarnations[name]

        def run() -> None:
            assert it.worker is not None
            with it.worker.scope():
                target()

        return self.scheduler.spawn(f"{name} {what}", it, run)

    def _join(self, it: Incarnation) -> None:
        """As rpc/join.py does; in a closed world all workers are known."""
        clock, transports = MonotonicClock(), Transports({"memory": self.network})
        id, limit = self.names.index(it.name), clock.now() + self.options.timeouts.join
        listener = transports.listen(_address(it.name, it.number if self.is_open else 0))
        roster = None
        if self._store is None:
            members = [Member(n, name, _address(name, 0)) for n, name in enumerate(self.names)]
            job, directory = "world", Directory(id, members)
        else:
            store = SignedStore(self._store, _SECRET, Refusals())
            roster = RosterStore(store, transports, clock)
            me = roster.register(it.name, id, listener.address, limit)
            job, others = roster.before(me, limit - self.options.timeouts.join / 2)
            directory = Directory(id, [*others, me], is_open=True)
        place = (directory, job, _SECRET, transports, listener)
        worker = Worker(*place, self.options, self.expose, roster=roster)
        self._workers.append(worker)
        if self.is_open:
            worker.announce(limit)
        self._open.enter_context(hearing(worker, partial(self._heard, worker.name)))
        it.worker = worker
        self.note("joined", it.name, f"incarnation {it.number}")

    def _clear(self) -> None:
        """Drop what this process knows of workers that have not shut down."""
        for worker in self._workers:
            worker.engine.edges.clear()


def _address(name: str, incarnation: int) -> str:
    return f"memory://{name}.{incarnation}"


_kinds = cache(kind_names)


@cache
def _kinds_of_backward() -> set[str]:
    return {name for kind, name in _kinds().items() if 0x20 <= kind < 0x30}
