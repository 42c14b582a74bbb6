"""Processes that stay at hand and run what they are given, one function after another.

A new process takes seconds to import torch, so whoever needs some again and again keeps them. They
end with the process that started them, like those of a run, and can be started again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar, cast, final

from gradwire.agent.messages import Failure
from gradwire.agent.remote_errors import describe, revive
from gradwire.errors import DeadlinePassed, PeerLost
from gradwire.launch.child import flush_output, prepare
from gradwire.launch.pickled_arguments import maybe_exception, packed, unpacked
from gradwire.launch.processes import Crew
from gradwire.rpc.expose.registry import exception_name

P = ParamSpec("P")
T = TypeVar("T")

_ERRAND_SECONDS = 60.0


@final
class Host:
    """A process that runs the functions it is given, one by one; it can be started again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._crew = Crew()
        self._inbound_requests: Connection | None = None

    def __repr__(self) -> str:
        return f"<Host {self.name}>"

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._crew.pid(0)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped since; it may still have died."""
        return self._inbound_requests is not None

    def start(self) -> None:
        """Begin to import; does not wait for it. Nothing happens if it runs already."""
        if self._inbound_requests is None:
            context = multiprocessing.get_context("spawn")
            self._inbound_requests, theirs = context.Pipe(duplex=True)
            with theirs:
                self._crew.start(f"host {self.name}", _do_errands, self.name, theirs)

    def stop(self) -> None:
        """End it, whatever it is doing; idempotent."""
        self._crew.stop()
        if self._inbound_requests is not None:
            self._inbound_requests.close()
            self._inbound_requests = None

    def kill(self) -> None:
        """End it without a chance to say anything, as the kernel does when memory is short."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def begin(self, fn: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have it run a function, and do not wait."""
        self.start()
        assert self._inbound_requests is not None
        with self._losses_named():
            self._inbound_requests.send_bytes(
                packed((fn, args, kwargs), f"an inbound request of {self.name}")
            )

    def finish(self, timeout: float = _ERRAND_SECONDS) -> object:
        """What the function that it began returned, or raise what it raised.

        A host that does not finish in time is stopped.
        """
        assert self._inbound_requests is not None, f"{self.name} has not begun anything"
        with self._losses_named():
            if not self._inbound_requests.poll(timeout):
                self.stop()
                raise DeadlinePassed(
                    f"{self.name} did not finish its inbound request in {timeout:g} s"
                )
            data = self._inbound_requests.recv_bytes()
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


def _do_errands(line: Connection, parent: int, name: str, inbound_requests: Connection) -> None:
    prepare(line, parent)
    while True:
        try:
            data = inbound_requests.recv_bytes()
        except EOFError:
            return
        inbound_requests.send_bytes(_outcome(name, data))
        flush_output()


def _outcome(name: str, data: bytes) -> bytes:
    try:
        fn, args, kwargs = unpacked(data, f"an inbound request of {name}")
        return packed((fn(*args, **kwargs),), f"the result of an inbound request of {name}")
    except BaseException as error:  # whatever it is, the asker must be told
        return packed(describe(error, name, exception_name), "a failure")
