"""Make things go wrong on purpose, in tests of gradwire and of programs that use it.

    arm, armed       at a point in the life of a message: see testing/failpoints.py for the words
    kill, frozen …   processes
    FaultProxy, proxied   the bytes between two workers
    testing/network.py    the network between them, for root

A fault that a test has armed and that never happened is a failure of the test. Other processes arm
theirs by the environment variable GRADWIRE_FAULTS, or by a call, if this module is exposed there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol, cast

from gradwire.current import current_inbound, current_worker
from gradwire.errors import DeadlinePassed, PeerLost
from gradwire.rpc.api import rpc_sync
from gradwire.rpc.worker import Worker
from gradwire.testing.failpoints import ACTIONS as ACTIONS
from gradwire.testing.failpoints import POINTS as POINTS
from gradwire.testing.failpoints import Failpoints, Fault
from gradwire.testing.failpoints import InjectedFault as InjectedFault
from gradwire.testing.proxy import HARMS as HARMS
from gradwire.testing.proxy import FaultProxy
from gradwire.testing.proxy import Way as Way

_FROZEN_SECONDS = 10.0


# -- failpoints


def arm(text: str = "", act: Callable[[], None] | None = None) -> None:
    """Let this go wrong on the worker whose code this is; without words, only count what is met.

    >>> gradwire.rpc_sync("w1", faults.arm, args=("kill before-reply Call",))
    """
    agent = _here().agent
    if agent.interceptor is None:
        agent.interceptor = Failpoints(agent.directory, agent.clock)
    points, inbound = _points(), current_inbound()
    if inbound is not None and inbound.request:
        points.ignore(inbound)
    points.arm(text, act)


def disarm() -> None:
    """Nothing more goes wrong on the worker whose code this is."""
    if _here().agent.interceptor is not None:
        _points().disarm()
        _here().agent.interceptor = None


def release() -> None:
    """What is delayed on the worker whose code this is goes on."""
    _points().release()


def fired() -> dict[str, bool]:
    """The faults armed on the worker whose code this is, and whether each has happened."""
    return _points().fired()


def seen() -> dict[str, int]:
    """How often each point was met there since `arm`, as in `before-send Call`."""
    return _points().seen()


@contextmanager
def armed(text: str, *, on: str | None = None) -> Iterator[None]:
    """Armed inside the block, here or on another worker; it fails if one has not happened.

    A worker that is gone has done what `kill` says; of others it is not known.
    """

    def ask(fn: Callable[..., object], *args: object) -> object:
        return fn(*args) if on is None else rpc_sync(on, fn, args=args)

    ask(arm, text)
    yield
    try:
        happened = cast(dict[str, bool], ask(fired))
        ask(disarm)
    except PeerLost:
        if all(Fault.parse(words).action == "kill" for words in text.split(";")):
            return
        raise
    missed = [fault for fault, is_over in happened.items() if not is_over]
    if missed:
        raise AssertionError(f"never happened on {on or _here().name}: {'; '.join(missed)}")


def _points() -> Failpoints:
    points = _here().agent.interceptor
    assert isinstance(points, Failpoints), "nothing is armed here"
    return points


# -- processes


class _Process(Protocol):
    @property
    def pid(self) -> int | None: ...


def kill(process: _Process | int) -> None:
    """End it without a chance to say anything."""
    os.kill(_number(process), signal.SIGKILL)


def freeze(process: _Process | int) -> None:
    """Stop all of its threads where they are; when this returns they are stopped."""
    pid = _number(process)
    os.kill(pid, signal.SIGSTOP)
    until = monotonic() + _FROZEN_SECONDS
    while _state(pid) not in "TZX":
        if monotonic() > until:
            raise DeadlinePassed(f"process {pid} did not stop in {_FROZEN_SECONDS:g} s")
        sleep(0.001)


def thaw(process: _Process | int) -> None:
    """Let it go on."""
    os.kill(_number(process), signal.SIGCONT)


@contextmanager
def frozen(process: _Process | int) -> Iterator[None]:
    """Stopped inside the block."""
    freeze(process)
    try:
        yield
    finally:
        thaw(process)


def _number(process: _Process | int) -> int:
    pid = process if isinstance(process, int) else process.pid
    assert pid is not None, "it was not started"
    return pid


def _state(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


# -- links


def redirect(worker: str, address: str) -> str:
    """From now on the worker whose code this is dials another there; where it did until now."""
    here = _here()
    number = here.directory.number(worker)
    before = here.directory.move(number, address)
    here.agent.hang_up(number, f"{worker} is reached by another way now")
    return before


@contextmanager
def proxied(worker: str, *, seed: int = 0) -> Iterator[FaultProxy]:
    """A proxy between the worker whose code this is and another, which listens on tcp."""
    here = _here()
    target = here.directory.address(here.directory.number(worker))
    with FaultProxy(target, seed=seed) as proxy:
        redirect(worker, proxy.address)
        try:
            yield proxy
        finally:
            redirect(worker, target)


def _here() -> Worker:
    return cast(Worker, current_worker.find())
