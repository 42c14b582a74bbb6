"""Failpoints: points on the way of a message at which a test can inject a fault.

    before-send    a message is about to be sent        after-send    it was sent
    before-handle  a peer's is about to be handled      after-handle  it was handled
    before-reply   a peer's request was handled, and its answer is about to be sent

A fault is written in words, for `gradwire.testing.faults.arm` or the environment variable
GRADWIRE_FAULTS, where `;` separates several:

    kill before-reply Call                    this process, by SIGKILL, at the first of them
    stop after-send Gradients on w1 nth 2     freeze it, only if this worker is w1
    delay before-handle Start for 0.5         seconds of the worker's clock, or until released
    close before-send Result with w0          the channel to that peer
    raise before-handle Call                  InjectedFault
    call before-send Commit                   the function that was given with it

The kind is that of the message, or `any`. Each fault happens once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.timer import Clock
from gradwire.agent.serving.dispatch import Payload, Registered, Run, Source
from gradwire.errors import GradwireError, UsageError
from gradwire.ids import WorkerId
from gradwire.options import faults_from_environment
from gradwire.transport.base import Channel
from gradwire.wire.message import IS_ANSWER, Frame, Message, kind_of

POINTS = ("before-send", "after-send", "before-handle", "after-handle", "before-reply")
ACTIONS = ("kill", "stop", "raise", "close", "delay", "call")
INJECTED = "a fault was injected"

_LONGEST_DELAY = 60.0
_GRAMMAR = "write `ACTION POINT KIND`, then any of `on WORKER`, `with PEER`, `nth N`, `for SECONDS`"


class InjectedFault(GradwireError):
    """Raised by a failpoint whose action is `raise`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An action, and the point and kind of message at which it happens.

    >>> print(Fault.parse("kill  before-reply Call nth 2 with w0"))
    kill before-reply Call with w0 nth 2
    """

    action: str
    point: str
    kind: str
    on: str | None = None
    peer: str | None = None
    nth: int = 1
    seconds: float = _LONGEST_DELAY

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that these words describe, or UsageError."""
        try:
            action, point, kind, *details = text.split()
            said = dict(zip(details[::2], details[1::2], strict=True))
            nth, seconds = int(said.pop("nth", 1)), float(said.pop("for", _LONGEST_DELAY))
            on, peer = said.pop("on", None), said.pop("with", None)
            if action not in ACTIONS or point not in POINTS or said:
                raise ValueError
        except ValueError:
            raise UsageError(f"not a fault: {text!r}", hint=_GRAMMAR) from None
        return cls(action, point, kind, on, peer, nth, seconds)

    def __str__(self) -> str:
        details = {"on": self.on, "with": self.peer}
        words = [f"{word} {value}" for word, value in details.items() if value is not None]
        words += [f"nth {self.nth}"] if self.nth != 1 else []
        words += [f"for {self.seconds:g}"] if self.seconds != _LONGEST_DELAY else []
        return " ".join([self.action, self.point, self.kind, *words])


@dataclass(slots=True)
class _Armed:
    fault: Fault
    act: Callable[[], None] | None
    reached: int = 0


@final
class Failpoints:
    """The failpoints of one worker: the interceptor of its agent."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory, self._clock = directory, clock
        self._lock = threading.RLock()
        self._armed: list[_Armed] = []
        self._seen: Counter[str] = Counter()
        self._asked: dict[tuple[Channel, int], str] = {}
        self._released = threading.Condition()
        self._releases = 0
        self._arming: set[tuple[Channel, int]] = set()  # requests that arm: their rest is ignored

    def arm(self, text: str, act: Callable[[], None] | None = None) -> None:
        """Add the faults that these words describe; `act` is what the action `call` calls."""
        for fault in map(Fault.parse, filter(str.strip, text.split(";"))):
            if (fault.action == "call") != (act is not None):
                raise UsageError(f"{fault}: the action `call`, and no other, needs what to call")
            if fault.on in (None, self._directory.me.name):
                with self._lock:
                    self._armed.append(_Armed(fault, act))

    def disarm(self) -> None:
        """Remove all faults, release what is delayed, and reset the counts."""
        with self._lock:
            self._armed.clear()
            self._arming.clear()
            self._seen.clear()
        self.release()

    def release(self) -> None:
        """End every delay now."""
        with self._released:
            self._releases += 1
            self._released.notify_all()

    def ignore(self, inbound: Source) -> None:
        """Ignore what follows of a request that is being served: it is the one that arms."""
        self._arming.add((inbound.channel, inbound.request))

    def fired(self) -> dict[str, bool]:
        """Each fault that is armed, and whether it has happened."""
        with self._lock:
            return {str(armed.fault): armed.reached >= armed.fault.nth for armed in self._armed}

    def seen(self) -> dict[str, int]:
        """How often each point was reached, by its name and the kind of message."""
        with self._lock:
            return dict(self._seen)

    # -- called by the agent

    def send(self, to: WorkerId, channel: Channel, frame: Frame, deadline: float) -> None:
        """Send a frame, with the points before and after it."""
        if frame.flags & IS_ANSWER:
            asked = self._asked.pop((channel, frame.request), None)
            if (channel, frame.request) in self._arming:
                return channel.send(frame, deadline)
            if asked is not None:
                self._at("before-reply", asked, to, channel)
        kind = _name(frame.kind)
        self._at("before-send", kind, to, channel)
        channel.send(frame, deadline)
        self._at("after-send", kind, to, channel)
        return None

    def around(self, frame: Frame, registered: Registered, run: Run) -> tuple[Registered, Run]:
        """The handler with the point before it, and what runs it with the point after it.

        What the first raises is answered to the peer; the second comes when that was sent.
        """
        name = _name(frame.kind)

        def handle(message: Message, payload: Payload, source: Source) -> None:
            if source.request:
                self._asked[source.channel, source.request] = name
            self._at("before-handle", name, source.worker, source.channel)
            registered.handler(message, payload, source)

        def run_around(source: Source, *args: object) -> None:
            run(source, *args)
            if (source.channel, source.request) not in self._arming:
                self._at("after-handle", name, source.worker, source.channel)

        return registered._replace(handler=handle), run_around

    def take_answer(self, take: Run, worker: WorkerId, channel: Channel, frame: Frame) -> None:
        """Take an answer, with the points before and after it."""
        name = _name(frame.kind)
        self._at("before-handle", name, worker, channel)
        take(worker, frame)
        self._at("after-handle", name, worker, channel)

    # -- actions

    def _at(self, point: str, kind: str, peer: WorkerId, channel: Channel) -> None:
        name = self._directory.name(peer)
        with self._lock:
            self._seen[f"{point} {kind}"] += 1
            due = [armed for armed in self._armed if _is_due(armed, point, kind, name)]
        for armed in due:
            self._act(armed, channel)

    def _act(self, armed: _Armed, channel: Channel) -> None:
        fault = armed.fault
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                # Sent to this thread: the process stops before this thread continues.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "raise":
                raise InjectedFault(f"{INJECTED}: {fault}")
            case "close":
                channel.close(f"{INJECTED}: {fault}")
            case "delay":
                until = self._clock.now() + fault.seconds
                with self._released:
                    releases = self._releases
                    while self._releases == releases and self._clock.now() < until:
                        self._clock.sleep(self._released, until)
            case _:
                assert armed.act is not None
                armed.act()


def kind_names() -> dict[int, str]:
    """The names of gradwire's messages, by their kinds."""
    ours = [cls for cls in Message.__subclasses__() if cls.__module__.startswith("gradwire.")]
    return {kind_of(cls): cls.__name__ for cls in ours}


def _name(kind: int) -> str:
    return kind_names().get(kind, f"{kind:#06x}")


def _is_due(armed: _Armed, point: str, kind: str, peer: str) -> bool:
    """Whether it happens now; counts how often its point was reached."""
    fault = armed.fault
    if fault.point != point or fault.kind not in (kind, "any") or fault.peer not in (None, peer):
        return False
    armed.reached += 1
    return armed.reached == fault.nth


def failpoints_by_environment(directory: Directory, clock: Clock) -> Failpoints | None:
    """The failpoints that GRADWIRE_FAULTS asks for; None if it is not set."""
    text = faults_from_environment()
    if not text.strip("; "):
        return None
    failpoints = Failpoints(directory, clock)
    failpoints.arm(text)
    return failpoints
