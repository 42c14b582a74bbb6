"""Real processes for tests: started once, made workers of one small cluster after another.

A new process takes seconds to import torch; to join takes it milliseconds. So hosts are started
once for a whole session, and each test has its own workers on them, over real sockets. Worker w0
is the test's own process, so that a test is plain code.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar, cast, final

from gradwire.agent.failure import describe, revive
from gradwire.agent.messages import Failure
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost
from gradwire.launch.child import AS_LONG_AS_IT_TAKES, flush_output, prepare
from gradwire.launch.crew import Crew
from gradwire.launch.luggage import maybe_exception, packed, unpacked
from gradwire.launch.plan import Orders, orders_for
from gradwire.options import Options
from gradwire.rpc.api import init_rpc, shutdown
from gradwire.rpc.registry import exception_name
from gradwire.rpc.rref import home_door
from gradwire.rpc.worker import Exposed

P = ParamSpec("P")
T = TypeVar("T")

_ERRAND_SECONDS = 60.0
_LEAVE_SECONDS = 5.0

Warned = list[tuple[type[Warning], str]]


@final
class Host:
    """A process that runs the functions it is given, one by one; it can be started again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._crew = Crew()
        self._errands: Connection | None = None

    def __repr__(self) -> str:
        return f"<Host {self.name}>"

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._crew.pid(0)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped since; it may still have died."""
        return self._errands is not None

    def start(self) -> None:
        """Begin to import; does not wait for it. Nothing happens if it runs already."""
        if self._errands is None:
            context = multiprocessing.get_context("spawn")
            self._errands, theirs = context.Pipe(duplex=True)
            with theirs:
                self._crew.start(f"gradwire {self.name}", _do_errands, self.name, theirs)

    def stop(self) -> None:
        """End it, whatever it is doing; idempotent."""
        self._crew.stop()
        if self._errands is not None:
            self._errands.close()
            self._errands = None

    def kill(self) -> None:
        """End it without a chance to say anything, as the kernel does when memory is short."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def begin(self, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have it run a function, and do not wait."""
        self.start()
        assert self._errands is not None
        with self._losses_named():
            self._errands.send_bytes(packed((fn, args, kwargs), f"an errand of {self.name}"))

    def finish(self, timeout: float = _ERRAND_SECONDS) -> object:
        """What the function that it began returned, or raise what it raised.

        A host that does not finish in time is stopped.
        """
        assert self._errands is not None, f"{self.name} has not begun anything"
        with self._losses_named():
            if not self._errands.poll(timeout):
                self.stop()
                raise DeadlinePassed(f"{self.name} did not finish its errand in {timeout:g} s")
            data = self._errands.recv_bytes()
        outcome = unpacked(data, f"what {self.name} returned")
        if isinstance(outcome, Failure):
            raise revive(outcome, maybe_exception)
        return outcome[0]

    def do(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have it run a function, and return what it returned or raise what it raised."""
        self.begin(fn, *args, **kwargs)
        return cast(T, self.finish())

    @contextmanager
    def _losses_named(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self.stop()
            raise PeerLost(f"the process of {self.name} died") from error


@final
class Hosts:
    """Processes at hand for workers w1, w2, …"""

    def __init__(self, count: int) -> None:
        self._hosts = [Host(f"w{n}") for n in range(1, count + 1)]

    def __enter__(self) -> Hosts:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.stop()

    def start(self) -> None:
        """Start those that do not run; does not wait for them."""
        for host in self._hosts:
            host.start()

    def take(self, count: int) -> list[Host]:
        """The first so many, more being made if there are not enough."""
        known = len(self._hosts)
        self._hosts += [Host(f"w{n}") for n in range(known + 1, count + 1)]
        return self._hosts[:count]


@contextmanager
def process_cluster(
    n: int,
    *,
    expose: Exposed = (),
    options: Options | None = None,
    hosts: Hosts | None = None,
) -> Iterator[Mapping[str, Host]]:
    """This process as worker w0, and n - 1 others on hosts; all have left when the block ends.

    Gives the hosts of the others, by name. What they warn of is warned of here at the end. One that
    is killed in the block is not missed; the next cluster that needs it starts it again.

    >>> with process_cluster(2) as others:
    ...     gradwire.rpc_sync("w1", torch.sin, args=(x,))
    """
    exposed = tuple(expose)
    with ExitStack() as stack:
        hosts = hosts or stack.enter_context(Hosts(n - 1))
        others = {host.name: host for host in hosts.take(n - 1)}
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-test-"))
        mine, *theirs = orders_for(n, options or Options(), Path(directory))
        for host, orders in zip(others.values(), theirs, strict=True):
            host.begin(_serve, orders, exposed)
        stack.enter_context(_sent_home(others, mine.options))
        init_rpc(mine.name, mine.rank, n, mine.options, expose=exposed)
        try:
            yield others
        finally:
            if home_door.maybe_default() is not None:  # unless the block itself has left
                shutdown()


def _serve(orders: Orders, expose: Exposed) -> Warned:
    """An errand: be a worker until the others are over. What was warned of meanwhile."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        init_rpc(orders.name, orders.rank, orders.world_size, orders.options, expose=expose)
        shutdown(timeout=AS_LONG_AS_IT_TAKES)
    return [(warning.category, str(warning.message)) for warning in warned]


@contextmanager
def _sent_home(others: Mapping[str, Host], options: Options) -> Iterator[None]:
    """Afterwards every host is free again: by itself if all went well, or it is stopped."""
    try:
        yield
    except BaseException:
        # They may wait for what never comes; but one that leaves in order need not start again.
        for host in others.values():
            _abandon(host)
        raise
    for host in others.values():
        warned = host.finish(options.timeouts.shutdown) if host.is_running else []
        for category, text in cast(Warned, warned):
            warnings.warn(f"{host.name}: {text}", category, stacklevel=4)


def _abandon(host: Host) -> None:
    try:
        host.finish(_LEAVE_SECONDS)
    except GradwireError:
        host.stop()


def _do_errands(line: Connection, parent: int, name: str, errands: Connection) -> None:
    prepare(line, parent)
    while True:
        try:
            data = errands.recv_bytes()
        except EOFError:
            return
        errands.send_bytes(_outcome(name, data))
        flush_output()


def _outcome(name: str, data: bytes) -> bytes:
    try:
        fn, args, kwargs = unpacked(data, f"an errand of {name}")
        return packed((fn(*args, **kwargs),), f"the result of an errand of {name}")
    except BaseException as error:  # whatever it is, the asker must be told
        return packed(describe(error, name, exception_name), "a failure")
