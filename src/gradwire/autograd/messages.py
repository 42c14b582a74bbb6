"""The messages of a backward pass and of contexts."""

from __future__ import annotations

import msgspec

from gradwire.agent.messages import Failure
from gradwire.autograd.modes import Modes
from gradwire.ids import ContextId, EdgeId, PassId
from gradwire.wire.message import Message, Seconds
from gradwire.wire.tensor import TensorHeader


class Crossing(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a message that cross by one edge, and what they depend on."""

    edge: EdgeId
    depth: int
    lineage: dict[int, bytes]
    """see lineage.Wire"""
    tensors: list[int]
    """their places among the tensors of the message"""


class Gradients(Message, frozen=True, tag=0x21):
    """Settles an edge: the gradients of its tensors, each present or None."""

    pass_id: PassId
    edge: EdgeId
    present: list[bool]
    tensors: list[TensorHeader]
    crossings: list[Crossing]
    last: bool = False
    """to the coordinator: with this the sender's run is over"""
    has_changed: bool = False
    """with `last`: whether the run has changed leaves; see RunDone"""


class Start(Message, frozen=True, tag=0x20):
    """The coordinator of a pass to a participant: run over these of your Sends, then answer."""

    pass_id: PassId
    floor: int
    """the coordinator's oldest pass that is not over: nothing more is said of those before it"""
    context: ContextId | None
    """whose map the gradients of leaves go to; without one they go to `.grad`"""
    edges: dict[int, bytes]
    """the receiver's edges of the pass; see lineage.Wire"""
    needed: dict[int, bytes] | None
    """under grad(): the coordinator's Sends that lead to its inputs; leaves then keep nothing"""
    retain_graph: bool
    create_graph: bool
    seconds: Seconds
    """how long until the deadline of the pass"""
    first: Gradients | None
    """the first gradients of the pass, if they are for the receiver: their edge is settled"""
    modes: Modes | None = None
    """the coordinator's anomaly mode and autocast, if one is on"""
    checkpoints: bool = True
    """whether reentrant checkpoints may run: not in a pass that is a part of grad()"""


class RunDone(Message, frozen=True, tag=0x22):
    """A participant to the coordinator: my run is over, or has failed."""

    pass_id: PassId
    has_changed: bool
    """whether the run has changed leaves: then the participant must hear how the pass ends"""
    failure: Failure | None = None


class PassEnded(Message, frozen=True, tag=0x24):
    """The coordinator to a participant: keep the changes of a pass, or revert them.

    A good end is told to participants that have changed leaves, a failure to all participants.
    """

    pass_id: PassId
    failure: Failure | None


class Release(Message, frozen=True, tag=0x2A):
    """To the sender of these edges: nobody can differentiate through them here any more."""

    edges: list[int]


class Forget(Message, frozen=True, tag=0x25):
    """The opener of a context to a worker that knows it: it is closed, drop it."""

    context: ContextId
    released: list[int]
    """edges of the receiver that are over; see Release"""


class QueryContext(Message, frozen=True, tag=0x26):
    """To the opener of a context, which answers Attended: tell me when it is closed."""

    context: ContextId


class Attended(Message, frozen=True, tag=0x27):
    """Whether the context is open, or not opened yet: then its opener tells when it closes."""

    is_open: bool


class QueryPass(Message, frozen=True, tag=0x28):
    """To the coordinator, which was lost and answers HasEnded: did this pass end well?"""

    pass_id: PassId


class HasEnded(Message, frozen=True, tag=0x29):
    """Whether the pass ended well."""

    ended_well: bool
