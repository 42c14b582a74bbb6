"""What a worker is and does now, as it answers to any member of its world.

Names, shapes and sizes are in it, values never. It has a bounded size: of each kind of thing the
oldest are listed, and the others counted. It is read from what the worker keeps anyway, so nothing
is counted or noted for it while nobody asks.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from gradwire.wire.message import Message, Seconds

MOST_LISTED = 64
"""of requests, served functions, passes and peers; the others are counted"""
MOST_EDGES = 16
MOST_TEXT = 200
MOST_STACKS = 1 << 16
"""characters of the stacks of one worker"""

Text = Annotated[str, Meta(max_length=MOST_TEXT)]
Count = Annotated[int, Meta(ge=0)]


class AskStatus(Message, frozen=True, tag=0x7A):
    """What are you, and what do you do now? Answered by Status."""


class AskStacks(Message, frozen=True, tag=0x7B):
    """Where are your threads? Answered by Stacks."""


class Stacks(Message, frozen=True, tag=0x7C):
    """The Python stacks of all threads of the process, as text."""

    text: Annotated[str, Meta(max_length=MOST_STACKS)]


class Unanswered(msgspec.Struct, frozen=True, array_like=True):
    """A request of this worker that has no answer yet."""

    peer: Text
    n: Count
    """its number at this worker"""
    what: Text
    age: Seconds
    left: Seconds
    """until its deadline"""
    made_for: tuple[Text, Count] | None = None
    """the request of a peer, being served here, that it was made for: the peer and the number"""


class Served(msgspec.Struct, frozen=True, array_like=True):
    """A request of a peer whose function is queued or runs here."""

    peer: Text
    n: Count
    """its number at the peer; 0 if it is not answered"""
    what: Text
    age: Seconds | None
    """since it began; None if it is queued"""


class PassNow(msgspec.Struct, frozen=True, array_like=True):
    """A backward pass in which this worker takes part."""

    id: Text
    coordinator: Text
    runs: bool
    """whether torch's engine runs here, or the pass began here"""
    age: Seconds
    left: Seconds
    awaited: Annotated[list[tuple[Text, Text]], Meta(max_length=MOST_LISTED)]
    """the edges whose gradients a thread waits for, each with the worker they come from"""
    not_done: Annotated[list[Text], Meta(max_length=MOST_LISTED)]
    """the participants that are waited for, as nothing is left to run here"""


class EdgeNow(msgspec.Struct, frozen=True, array_like=True):
    """An edge that holds a graph here; see LiveEdge."""

    edge: Text
    to: Text
    age: Seconds
    bytes: Count
    line: Text


class PeerTraffic(msgspec.Struct, frozen=True, array_like=True):
    """What this worker has exchanged with one peer."""

    peer: Text
    sent_bytes: Count
    received_bytes: Count
    silence: Seconds
    """for how long the peer has given no sign of life, if that is suspect; else 0"""


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """How many there are, or have been since this incarnation began."""

    calls_made: Count = 0
    calls_served: Count = 0
    calls_failed: Count = 0
    in_flight: Count = 0
    served_now: Count = 0
    passes: Count = 0
    edges: Count = 0
    contexts: Count = 0
    references: Count = 0
    """values that live here and other workers hold, and references that this worker holds"""


class Status(Message, frozen=True, tag=0x7D):
    """What a worker is and does now; of each list the oldest."""

    worker: Text
    incarnation: Count
    pid: Count
    has_program: bool
    """whether its own program may still run; otherwise it only serves"""
    threads: Count
    rss: Count
    """bytes of memory of its process"""
    totals: Totals
    in_flight: Annotated[list[Unanswered], Meta(max_length=MOST_LISTED)]
    serves: Annotated[list[Served], Meta(max_length=MOST_LISTED)]
    passes: Annotated[list[PassNow], Meta(max_length=MOST_LISTED)]
    edges: Annotated[list[EdgeNow], Meta(max_length=MOST_EDGES)]
    traffic: Annotated[list[PeerTraffic], Meta(max_length=MOST_LISTED)]


def sendable(text: str) -> str:
    """A text that UTF-8 can hold: a path may have any bytes."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def clipped(text: str) -> str:
    """The beginning of a text, as it may be sent."""
    return sendable(text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…")


def clipped_left(text: str) -> str:
    """The end of a text, as of a path, as it may be sent."""
    return sendable(text if len(text) <= MOST_TEXT else "…" + text[1 - MOST_TEXT :])


class Doing(Enum):
    """What a worker does, in one word."""

    RUNS = "runs"
    WAITS = "waits"
    IDLE = "idle"
    SILENT = "silent"
    """it does not answer"""
    UNKNOWN = "unknown"
    """it was not asked yet"""


def doing(status: Status) -> Doing:
    """What a worker does that answers.

    A function or a pass of its own runs, or all of them wait for other workers. A program of its
    own runs whenever it waits for nothing: whether it computes or sleeps is not known.
    """
    served = [each for each in status.serves if each.age is not None]
    waiting = {request.made_for for request in status.in_flight}
    passes = [each for each in status.passes if each.runs]
    stuck = [each for each in passes if each.awaited or each.not_done]
    if any((each.peer, each.n) not in waiting for each in served) or len(stuck) < len(passes):
        return Doing.RUNS
    if status.in_flight or stuck:
        return Doing.WAITS
    return Doing.RUNS if status.has_program else Doing.IDLE
