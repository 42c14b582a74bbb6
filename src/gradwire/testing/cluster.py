"""n workers inside this process, over in-memory channels.

They run the shipped codec, registry and states; only the link between them differs. Made for tests,
notebooks and documentation: no ports, no processes, and hundreds of them start in a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar, final

import torch

from gradwire.agent.devices.own import Drivers, drivers_of_this_process
from gradwire.agent.peers.directory import Directory, Member
from gradwire.agent.peers.secret import fresh_secret
from gradwire.agent.requests.timer import Clock, MonotonicClock
from gradwire.errors import PeerLost, UsageError
from gradwire.options import Options
from gradwire.rpc.behavior import NATIVE, Behavior
from gradwire.rpc.expose.registry import listed
from gradwire.rpc.worker import Exposed, OwnGenerator, Worker
from gradwire.seeing.messages import CROSSINGS
from gradwire.seeing.recording import read
from gradwire.testing.failpoints import failpoints_by_environment
from gradwire.testing.generators import drawing_from
from gradwire.transport.address import Transports
from gradwire.transport.base import Listener
from gradwire.transport.memory import MemoryNetwork

P = ParamSpec("P")
T = TypeVar("T")
_Start = Callable[[Directory, Listener], Worker]


@final
class ClusterWorker:
    """One worker of a cluster."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.name = worker.name

    def __repr__(self) -> str:
        return f"<ClusterWorker {self.name}>"

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function here, in this thread, as that worker."""
        with self.worker.scope():
            return fn(*args, **kwargs)


@final
class Cluster(Sequence[ClusterWorker]):
    """The workers, by number; made by `cluster`."""

    def __init__(self, n: int, transports: Transports, start: _Start) -> None:
        self._transports, self._start = transports, start
        listeners = [transports.listen(f"memory://w{id}") for id in range(n)]
        self._places = [Member(id, f"w{id}", listeners[id].address) for id in range(n)]
        workers = [start(Directory(id, self._places), listeners[id]) for id in range(n)]
        self._members = [ClusterWorker(worker) for worker in workers]

    def __getitem__(self, n: int) -> ClusterWorker:  # type: ignore[override]
        return self._members[n]

    def __len__(self) -> int:
        return len(self._members)

    def restart(self, n: int) -> ClusterWorker:
        """End a worker without notice and start it again: a new incarnation, same name and number.

        The others know of it when this returns.
        """
        worker = self._members[n].worker
        worker.close()
        incarnation = worker.directory.myself.incarnation + 1
        listener = self._transports.listen(f"memory://{worker.name}.{incarnation}")
        self._places[n] = Member(n, worker.name, listener.address, incarnation)
        born = self._start(Directory(n, self._places), listener)
        for other in born.directory.others():
            with suppress(PeerLost):  # it is not there either, and will look for us
                limit = born.agent.clock.now() + born.options.timeouts.connect
                born.agent.reach(other.id, limit)
        member = self._members[n] = ClusterWorker(born)
        return member

    @contextmanager
    def trace(self) -> Iterator[list[str]]:
        """What crossed inside the block, as lines in the order it began; they are there after it.

        Each is `worker>peer what id`: calls and answers, passes, their runs and gradients.
        """
        lines: list[str] = []
        with ExitStack() as stack:
            workers = [member.worker for member in self._members]
            kept = [stack.enter_context(worker.events.recording()) for worker in workers]
            yield lines
            events = [
                (w.name, e)
                for w, taken in zip(workers, kept, strict=True)
                for e in read(w, taken())
            ]
        events.sort(key=lambda each: (each[1].began, each[1].n))
        lines += [event.line(name) for name, event in events if event.what in CROSSINGS]


@contextmanager
def cluster(
    n: int,
    *,
    expose: Exposed = (),
    options: Options | None = None,
    clock: Clock | None = None,
    behavior: Behavior | None = None,
    generators: Sequence[torch.Generator] | None = None,
    drivers: Drivers | None = None,
) -> Iterator[Cluster]:
    """n workers named w0, w1, … in this process; they are gone when the block ends.

    >>> with cluster(2) as workers:
    ...     workers[0].run(gradwire.rpc_sync, "w1", torch.sin, args=(x,))

    They share the default generator of the process, unless each is given one of its own; see
    testing/generators.py. `drivers` may give them pretended devices; see testing/pretend.
    """
    if generators is not None and len(generators) != n:
        raise UsageError(f"{n} workers were given {len(generators)} generators")
    options, clock, exposed = options or Options(), clock or MonotonicClock(), listed(expose)
    transports = Transports({"memory": MemoryNetwork(limits=options.limits)})
    job = ("cluster", fresh_secret(), transports)
    with ExitStack() as running:

        def start(directory: Directory, listener: Listener) -> Worker:
            mine = None if generators is None else generators[directory.me.id]
            worker = Worker(
                directory,
                *job,
                listener,
                options,
                exposed,
                clock,
                behavior=behavior or NATIVE,
                own=None if mine is None else OwnGenerator(mine, partial(drawing_from, mine)),
                interceptor=failpoints_by_environment(directory, clock),
                drivers=drivers or drivers_of_this_process,
            )
            running.callback(worker.close)
            return worker

        yield Cluster(n, transports, start)
