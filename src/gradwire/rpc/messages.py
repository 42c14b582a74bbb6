"""The messages about calls, values and references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from gradwire.autograd.messages import Crossing
from gradwire.autograd.modes import Modes
from gradwire.ids import ContextId, ForkId, RefId, WorkerId
from gradwire.wire.message import Message, Seconds
from gradwire.wire.tensor import TensorHeader

TraceParent = Annotated[
    str,
    msgspec.Meta(
        pattern="^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$",
        min_length=55,
        max_length=55,
    ),
]
"""Version, trace, span and flags. A message with anything else is refused when it is decoded."""


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """A reference in a body, to a value of this incarnation of its owner."""

    ref: RefId
    owner: WorkerId
    fork: ForkId
    incarnation: int = 0


class Body(msgspec.Struct, frozen=True, array_like=True):
    """A value encoded for one peer. The bytes of its tensors are the payload of the message."""

    data: bytes
    tensors: list[TensorHeader]
    crossings: list[Crossing]
    references: list[Reference]
    released: list[int] = []
    """edges of the receiver that the sender holds no more; see autograd/graph/release.py"""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """The reference under which the callee keeps the result of a call.

    `fork` is None if caller and callee are the same worker.
    """

    ref: RefId
    fork: ForkId | None


class Draws(msgspec.Struct, frozen=True, array_like=True):
    """The random numbers of a call that is made inside of an activation checkpoint.

    See Note [Random numbers under a checkpoint], recompute/checkpoint_run.py.
    """

    again: bool
    """the call is a repetition: the callee restores its generators afterwards"""
    state: bytes = b""
    """`Result.draws` of the first call, if it drew random numbers"""
    known: bool = True
    """whether the first call was answered"""


class Call(Message, frozen=True, tag=0x40):
    """Run a function. `body` holds (args, kwargs).

    Note [How a call names its function]:
        module:name   looked up in the registry of the callee
        .name         a method of the value that the first argument refers to
        !name         the first argument itself, with pickles; the name is for messages only
    """

    function: str
    body: Body
    context: ContextId | None
    grad_enabled: bool
    inference: bool
    seconds: Seconds
    keep: Kept | None = None
    draws: Draws | None = None
    modes: Modes | None = None
    """the caller's anomaly mode and autocast, if one is on"""
    depth: int = 0
    """how many enclosing calls share one deadline, and in how many seconds (`room`) they end one
    after the other; see Note [Deadlines of nested calls], agent/requests/timer.py
    """
    room: Seconds = 0.0
    device_map: dict[str, str] | None = None
    """by which tensors came; the result returns by the inverted map"""
    in_pass: bool = False
    """whether it is made while a `backward(context, …)` runs, whose map is not at the callee"""
    traceparent: TraceParent | None = None
    """the OpenTelemetry span of the call, if it has one, as in the HTTP header of the W3C"""


class Result(Message, frozen=True, tag=0x41):
    """What the function returned.

    `accepted` are forks from the call's arguments that are counted now: a piggybacked Accept for
    each. `copies` counts tensors that require grad but were copied inside of an object without
    their graph; the caller warns of them. `draws` lets the callee repeat the random numbers that
    it drew; only the callee can read it.
    """

    body: Body
    accepted: Sequence[ForkId] = ()
    copies: int = 0
    draws: bytes = b""


class Fetch(Message, frozen=True, tag=0x42):
    """Send me the value of this reference. Answered by Result."""

    ref: RefId
    context: ContextId | None
    seconds: Seconds
    device_map: dict[str, str] | None = None
    """of the receiver for the other way: the value comes by the inverted map"""


class Fork(Message, frozen=True, tag=0x43):
    """I hold this fork of your value: count it. Answered by Counted."""

    ref: RefId
    fork: ForkId
    n: int
    """number of the request; a repetition has the same"""
    acked_below: int
    """all my requests to you below this number are answered"""


class Counted(Message, frozen=True, tag=0x44):
    """The answer to a Fork or a QueryFork."""

    verdict: str


class Accept(Message, frozen=True, tag=0x45):
    """The owner has counted the fork that you made for me: you need not keep yours for it."""

    fork: ForkId


class Drop(Message, frozen=True, tag=0x46):
    """I have dropped these forks of your values."""

    dropped: Sequence[tuple[RefId, ForkId]]
    acked_below: int
    """as in Fork"""


class BackwardFrom(Message, frozen=True, tag=0x47):
    """Run `backward(context, [value])` on the owner of the value."""

    ref: RefId
    context: ContextId
    retain_graph: bool
    seconds: Seconds
    modes: Modes | None = None
    """as in Call"""


class QueryFork(Message, frozen=True, tag=0x48):
    """The owner does not know the value of this fork that you made for me: may it still come?

    Answered by Counted.
    """

    fork: ForkId


class ValueReady(Message, frozen=True, tag=0x49):
    """The value of a checkpointed `remote` call is ready; `draws` as in Result."""

    draws: bytes
