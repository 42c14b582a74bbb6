"""The messages by which workers describe their parts of a graph: names, shapes and sizes only."""

from __future__ import annotations

import msgspec

from gradwire.ids import ContextId, EdgeId, WorkerId
from gradwire.rpc.graph_cut import Cut
from gradwire.wire.message import Message


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """What is said of a tensor."""

    dtype: str
    shape: list[int]

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"


class LocalPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a graph that lies on one worker, between its crossings."""

    nodes: int
    parameters: int
    leaves: int
    """other tensors that gradients are added to"""
    saved: int
    """bytes that its nodes have saved for the backward, if it is reached; without parameters"""
    unknown: int
    """saved tensors whose size is not known: hooks of the program have packed them"""
    operators: list[tuple[str, int]]
    """the most frequent ones, and how often they are there"""
    is_reached: bool
    roots: list[TensorShape]


class EdgeSeen(msgspec.Struct, frozen=True, array_like=True):
    """One end of an edge, as the worker on which it lies sees it."""

    edge: EdgeId
    peer: WorkerId
    """at the other end"""
    depth: int
    part: int
    """the number of the part that it leaves, or that it leads to"""
    tensors: list[TensorShape]
    """the first few"""
    count: int
    """how many there are"""
    bytes: int
    line: str
    """of the program that sent them, if this is the sender and it was not the result of a call"""
    is_reached: bool


class DescribeGraph(Message, frozen=True, tag=0x78):
    """To a worker that a graph reaches, which answers GraphParts."""

    lineage: dict[int, bytes]
    """all edges that the graph depends on; see lineage.Wire"""
    most: int
    """how many of its own edges the receiver describes, and as many of what is not reached"""
    contexts: list[ContextId | None]
    """those of the graph: what else was recorded in them is described too, as not reached"""
    measures: bool
    """whether to say how much was saved; see Note [Saved tensors are read as they are]"""


class GraphParts(Message, frozen=True, tag=0x79):
    """What lies on one worker."""

    parts: list[LocalPart]
    inside: list[tuple[int, int]]
    """from which part to which a tensor leads without a crossing"""
    sent: list[EdgeSeen]
    received: list[EdgeSeen]
    gone: list[int]
    """edges that were asked for and are not there any more"""
    is_cut_short: bool
    """whether there is more than is said here"""
    cuts: list[Cut]
