"""The messages of a trace, from the worker that makes it to each one that it looks at.

They are served in the service lane: a worker whose functions hang is seen, too.
"""

from __future__ import annotations

import msgspec

from gradwire.wire.message import Message

CROSSINGS = {"call", "answer", "start", "run", "gradients", "end", "fail", "cancel", "late"}
"""the kinds of events that tell what crossed, and of passes; the others are waits and work"""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker did, in texts and numbers; times are those of its clock, in seconds."""

    n: int
    what: str
    began: float
    ended: float
    thread: int
    id: str = ""
    peer: str = ""
    about: str = ""
    tensors: str = ""
    """their dtypes and shapes, if it carried any"""
    size: int = 0

    def line(self, worker: str) -> str:
        """As tests and logs show it.

        >>> Event(1, "call", 0.0, 0.1, 7, "w0#1", "w1").line("w0")
        'w0>w1 call w0#1'
        """
        arrow = f">{self.peer}" if self.peer else ""
        return " ".join(filter(None, (f"{worker}{arrow}", self.what, self.id)))


class Record(Message, frozen=True, tag=0x70):
    """Record from now on, for this trace of the sender. Answered by NowRecording."""

    trace: int
    torch: bool = False
    """with torch's profiler, too"""


class NowRecording(Message, frozen=True, tag=0x71):
    """This worker records; who it is, for the trace."""

    pid: int
    machine: str
    """the same on all workers whose clocks are one; empty if unknown"""
    host: str
    profiles: bool = False
    """whether torch's profiler runs for this trace"""


class ReadClock(Message, frozen=True, tag=0x72):
    """Answered by ClockRead."""


class ClockRead(Message, frozen=True, tag=0x73):
    """What the clock showed."""

    now: float


class Take(Message, frozen=True, tag=0x74):
    """Stop recording for this trace, and send the next of its events. Answered by EventsTaken."""

    trace: int


class EventsTaken(Message, frozen=True, tag=0x75):
    """The oldest of these events, as msgpack in the payload, and whether more are left."""

    more: bool
    dropped: int
    """how many the worker did not keep, as they were too many"""
    threads: dict[int, str]
    """the names of its threads"""
    ways: dict[str, str]
    """how it reaches the peers that it is connected to: by unix, tcp, tls or memory"""


class TakeProfile(Message, frozen=True, tag=0x76):
    """Send a part of the profile of this trace, from this byte on. Answered by ProfilePart."""

    trace: int
    start: int


class ProfilePart(Message, frozen=True, tag=0x77):
    """The bytes are the payload; `total` is the length of the whole profile."""

    total: int
    ahead: int
    """nanoseconds by which its clock is ahead of the clock of the events"""
    failure: str = ""
