"""Make things go wrong on purpose, in tests of gradwire and of programs that use it.

A fault happens at a point in the life of a message; testing/failpoints.py has the words for it. One
that a test has armed and that never happened is a failure of the test. Other processes arm theirs
by the environment variable GRADWIRE_FAULTS, or by a call, if this module is exposed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from gradwire.current import current_inbound, current_worker
from gradwire.errors import PeerLost
from gradwire.rpc.api import rpc_sync
from gradwire.rpc.worker import Worker
from gradwire.testing.failpoints import Failpoints, Fault
from gradwire.testing.failpoints import InjectedFault as InjectedFault


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


def _here() -> Worker:
    return cast(Worker, current_worker.find())
