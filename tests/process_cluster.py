"""Workers on real processes, for tests: each test joins new workers on processes that are reused.

A new process takes seconds to import torch; joining takes milliseconds. So hosts are started once
per session, and each test has its own workers on them, over real sockets. Worker w0 runs in the
process of the test itself. A host ends with the process that started it, and can be restarted.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar, cast, final

from gradwire import threads
from gradwire.agent.messages import Failure
from gradwire.agent.peers.secret import write_secret
from gradwire.agent.remote_errors import describe, revive
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost
from gradwire.launch import child
from gradwire.launch.processes import ProcessGroup
from gradwire.options import FOREVER, Options
from gradwire.rpc.api import init_rpc, shutdown
from gradwire.rpc.codec.pickle_codec import sent_exception
from gradwire.rpc.expose.registry import exception_name
from gradwire.rpc.worker import Exposed

_LEAVE_SECONDS = 5.0
_TASK_SECONDS = 60.0

Warned = list[tuple[type[Warning], str]]
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def process_cluster(
    n: int, *, expose: Exposed = (), options: Options | None = None, hosts: Hosts | None = None
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
        options = options or Options()
        if options.secret is None:
            write_secret(Path(directory) / child.SECRET)
        mine, *theirs = child.worker_specs(n, options, Path(directory))
        for host, spec in zip(others.values(), theirs, strict=True):
            host.begin(_serve, spec, exposed)
        stack.enter_context(_finishing(others, mine.options))
        init_rpc(mine.name, mine.rank, n, mine.options, expose=exposed)
        try:
            yield others
        finally:
            if current_worker.maybe_default() is not None:  # unless the block itself has left
                shutdown()


def _serve(spec: child.WorkerSpec, expose: Exposed) -> Warned:
    """The task of a host: be a worker until the others leave; returns the warnings it gave."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        init_rpc(spec.name, spec.rank, spec.world_size, spec.options, expose=expose)
        shutdown(timeout=FOREVER)
    return [(warning.category, str(warning.message)) for warning in warned]


@contextmanager
def _finishing(others: Mapping[str, Host], options: Options) -> Iterator[None]:
    """Afterwards every host is free again: by itself if all went well, or it is stopped."""
    try:
        yield
    except BaseException:
        # They may wait for what never comes; but one that leaves in time need not start again.
        for host in others.values():
            with suppress(GradwireError):
                _finish(host, _LEAVE_SECONDS)
        raise
    with ExitStack() as all_of_them:  # each is finished, even if another one raises
        for host in others.values():
            all_of_them.callback(_finish, host, options.timeouts.shutdown)


def _finish(host: Host, seconds: float) -> None:
    warned = host.finish(seconds) if host.is_running else []
    for category, text in cast(Warned, warned):
        warnings.warn(f"{host.name}: {text}", category, stacklevel=2)


@final
class Host:
    """A process that runs the functions it is given, one by one; it can be restarted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._group = ProcessGroup()
        self._tasks: Connection | None = None

    def __repr__(self) -> str:
        return f"<Host {self.name}>"

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._group.pid(0)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped since; it may have died."""
        return self._tasks is not None

    def start(self) -> None:
        """Start the process without waiting for its imports; does nothing if it runs already."""
        if self._tasks is None:
            context = multiprocessing.get_context("spawn")
            self._tasks, theirs = context.Pipe(duplex=True)
            with theirs:
                self._group.start(f"host {self.name}", _run_tasks, self.name, theirs)

    def stop(self) -> None:
        """Stop the process, whatever it is doing; idempotent."""
        self._group.stop()
        if self._tasks is not None:
            self._tasks.close()
            self._tasks = None

    def kill(self) -> None:
        """Send SIGKILL to the process, as the kernel does when memory runs out."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def begin(self, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a function there, without waiting for it."""
        self.start()
        assert self._tasks is not None
        with self._naming_losses():
            self._tasks.send_bytes(child.pickled((fn, args, kwargs), f"a task of {self.name}"))

    def finish(self, timeout: float = _TASK_SECONDS) -> object:
        """The outcome of what `begin` started; a host that does not finish in time is stopped."""
        assert self._tasks is not None, f"{self.name} has not begun anything"
        with self._naming_losses():
            if not self._tasks.poll(timeout):
                self.stop()
                raise DeadlinePassed(f"{self.name} did not finish its task in {timeout:g} s")
            data = self._tasks.recv_bytes()
        outcome = child.unpickled(data, f"what {self.name} returned")
        if isinstance(outcome, Failure):
            raise revive(outcome, sent_exception)
        return outcome[0]

    def do(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function there; return what it returned or raise what it raised."""
        self.begin(fn, *args, **kwargs)
        return cast(T, self.finish())

    @contextmanager
    def _naming_losses(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self.stop()
            raise PeerLost(f"the process of {self.name} died") from error


@final
class Hosts:
    """A pool of processes for workers w1, w2, …"""

    def __init__(self, count: int) -> None:
        self._hosts = [Host(f"w{n}") for n in range(1, count + 1)]

    def __enter__(self) -> Hosts:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.stop()

    def start(self) -> None:
        """Start those that do not run, without waiting for their imports."""
        for host in self._hosts:
            host.start()

    def take(self, count: int) -> list[Host]:
        """The first `count` hosts; missing ones are added."""
        self._hosts += [Host(f"w{n}") for n in range(len(self._hosts) + 1, count + 1)]
        return self._hosts[:count]


def _run_tasks(pipe: Connection, parent: int, name: str, tasks: Connection) -> None:
    child.prepare(pipe, parent)
    while True:
        try:
            data = tasks.recv_bytes()
        except EOFError:
            return
        try:
            fn, args, kwargs = child.unpickled(data, f"a task of {name}")
            outcome = child.pickled((fn(*args, **kwargs),), f"the result of a task of {name}")
        except BaseException as error:  # reported to the test, whatever it is
            outcome = child.pickled(describe(error, name, exception_name), "a failure")
        tasks.send_bytes(outcome)
        threads.flush_output()
