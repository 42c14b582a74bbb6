"""What workers say to each other about functions and values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gradwire.autograd.messages import Crossing
from gradwire.ids import ContextId, ForkId, RefId, WorkerId
from gradwire.wire.message import Message, Seconds
from gradwire.wire.tensor_header import TensorHeader


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """A reference that travels in a body; to a value of this life of its owner."""

    ref: RefId
    owner: WorkerId
    fork: ForkId
    life: int = 0


class Body(msgspec.Struct, frozen=True, array_like=True):
    """A value packed for one peer. The bytes of its tensors are the payload of the message."""

    data: bytes
    tensors: list[TensorHeader]
    crossings: list[Crossing]
    references: list[Reference]


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """Where the result of a call stays. Without a fork the caller itself owns it."""

    ref: RefId
    fork: ForkId | None


class Draws(msgspec.Struct, frozen=True, array_like=True):
    """A call is made for a checkpoint.

    See Note [Random numbers under a checkpoint], recompute/checkpoint_run.py.
    """

    again: bool
    """it repeats a call: the callee puts back its generators afterwards"""
    state: bytes = b""
    """what the callee has answered at first, if that drew random numbers"""
    known: bool = True
    """whether that answer is there"""


class Call(Message, frozen=True, tag=0x40):
    """Run a function. `body` holds (args, kwargs).

    Note [How a call names its function]:
        module:name   looked up in the registry of the callee
        .name         a method of the value that the first argument refers to
        !name         the first argument itself, where pickles travel; the name is for people
    """

    function: str
    body: Body
    context: ContextId | None
    grad_enabled: bool
    inference: bool
    seconds: Seconds
    keep: Kept | None = None
    draws: Draws | None = None
    anomaly: int = 0
    """the caller's anomaly mode; see autograd/anomaly.py"""
    depth: int = 0
    """how many calls around it share one deadline, and the time by which these end before each
    other in all; see Note [Deadlines of nested calls], agent/requests/timer.py
    """
    room: Seconds = 0.0


class Result(Message, frozen=True, tag=0x41):
    """What the function returned.

    `accepted` are forks that came with the call and need those of the caller no longer: an Accept
    for each, at no cost. `copies` are tensors that require grad but travel inside an object, as
    copies without their graph: the caller is warned of them. `draws` repeats the random numbers
    that were drawn: only the worker that answers can read it.
    """

    body: Body
    accepted: Sequence[ForkId] = ()
    copies: int = 0
    draws: bytes = b""


class Fetch(Message, frozen=True, tag=0x42):
    """Send me the value of this reference; answered by Result."""

    ref: RefId
    context: ContextId | None
    seconds: Seconds


class Fork(Message, frozen=True, tag=0x43):
    """I hold this fork of your value: count it. Answered by Counted."""

    ref: RefId
    fork: ForkId
    n: int
    """the number of this request; a repetition has the same"""
    acked_below: int
    """all my requests to you below this number are answered"""


class Counted(Message, frozen=True, tag=0x44):
    """The verdict on a Fork, or an Expected."""

    verdict: str


class Accept(Message, frozen=True, tag=0x45):
    """The fork you made for me needs yours no longer."""

    fork: ForkId


class Drop(Message, frozen=True, tag=0x46):
    """I hold this fork no longer."""

    ref: RefId
    fork: ForkId
    acked_below: int
    """as in Fork"""


class BackwardFrom(Message, frozen=True, tag=0x47):
    """Run `backward(context, [value])` where the value lives."""

    ref: RefId
    context: ContextId
    retain_graph: bool
    seconds: Seconds
    anomaly: int = 0
    """as in Call"""


class Expected(Message, frozen=True, tag=0x48):
    """The owner does not know the value of this fork that you made for me: may it still come?

    Answered by Counted.
    """

    fork: ForkId


class Made(Message, frozen=True, tag=0x49):
    """The value that a checkpoint's call keeps here is made; `draws` as in Result."""

    draws: bytes
