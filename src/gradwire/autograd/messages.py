"""What workers say to each other about gradients."""

from __future__ import annotations

import msgspec

from gradwire.agent.messages import Failure
from gradwire.ids import ContextId, EdgeId, PassId, WorkerId
from gradwire.wire.message import Message, Seconds
from gradwire.wire.tensor import TensorHeader

TO_GRAD, TO_MAP, NOWHERE = 0, 1, 2
"""Where leaves keep their gradients in a pass: `.grad`, the context's map, or not at all."""


class Crossing(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a message that cross by one edge, and what they depend on."""

    edge: EdgeId
    depth: int
    lineage: dict[WorkerId, bytes]
    tensors: list[int]
    """their places among the tensors of the message"""


class Gradients(Message, frozen=True, tag=0x21):
    """An edge is settled: the gradients of its tensors, each there or not, on their way home."""

    context: ContextId
    pass_id: PassId
    edge: EdgeId
    present: list[bool]
    tensors: list[TensorHeader]
    crossings: list[Crossing]
    last: bool = False
    """to the root: with this the sender's part of the pass is over"""
    has_changed: bool = False
    """the last: whether leaves were changed there; see RunDone"""


class Start(Message, frozen=True, tag=0x20):
    """A pass has begun: run over these of your sends, then tell the root."""

    context: ContextId
    pass_id: PassId
    edges: bytes
    """the receiver's edges of the pass, as a bitset"""
    needed: bytes | None
    """under grad(): the root's sends that lead to its inputs"""
    destination: int
    retain_graph: bool
    create_graph: bool
    seconds: Seconds
    """what is left until the pass is given up"""
    first: Gradients | None
    """the first gradients of the pass, if they are for the receiver: their edge is settled"""
    anomaly: int = 0
    """the root's anomaly mode; see anomaly.py"""
    checkpoints: bool = True
    """whether reentrant checkpoints may run: not in a pass that is a part of grad()"""


class RunDone(Message, frozen=True, tag=0x22):
    """A worker to the root: my part of the pass is over."""

    context: ContextId
    pass_id: PassId
    has_changed: bool
    """whether leaves were changed here: then it wants to hear how the pass ends"""


class RunFailed(Message, frozen=True, tag=0x23):
    """A worker to the root: my part of the pass failed."""

    context: ContextId
    pass_id: PassId
    failure: Failure


class PassEnded(Message, frozen=True, tag=0x24):
    """The root: keep the gradients of a pass, or put back what was there before.

    A good end is told to those who have changed something, a failure to everyone in the pass.
    """

    context: ContextId
    pass_id: PassId
    failure: Failure | None


class Forget(Message, frozen=True, tag=0x25):
    """A context is closed: drop it, and tell those you called in it."""

    context: ContextId
    lost: str = ""
    """the opener, if the sender has lost it: then nobody knows whether it is closed there"""


class QueryContext(Message, frozen=True, tag=0x26):
    """To the opener of a context: I know it from somebody who is lost; tell me when it is closed.

    Answered by Attended.
    """

    context: ContextId


class Attended(Message, frozen=True, tag=0x27):
    """Whether the context is open, or not opened yet; if open, its opener tells when it closes."""

    is_open: bool


class QueryPass(Message, frozen=True, tag=0x28):
    """To the root, after its connection was lost: did you keep this pass? Answered by HasEnded."""

    context: ContextId
    pass_id: PassId


class HasEnded(Message, frozen=True, tag=0x29):
    """Whether the pass ended well."""

    ended_well: bool
