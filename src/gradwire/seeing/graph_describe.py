"""What one worker says of its parts of a graph: how many nodes, parameters and saved bytes.

Note [Saved tensors are read as they are]: `_saved_self` and the like unpack what was saved, which
runs hooks of the program: a checkpoint would compute its forward again. The `_raw_saved_` ones give
what is kept, which is a tensor, or anything else that a hook has made of it: then the size is not
known.

An engine run on another thread frees what was saved without a lock that Python could take, and to
read it in that moment is to use freed memory. So only what the roots depend on is measured: other
graphs may be differentiated at any time by whoever made them, this one only by who draws it. If
that happens in a pass, on the worker that draws it or here, nothing is measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast, final

import torch

from gradwire.autograd.engine import Engine
from gradwire.autograd.graph.crossing import RECV, SEND, end_of
from gradwire.autograd.graph.edges import Sent
from gradwire.autograd.graph.lineage import Lineage, has, latest_numbers, of_worker
from gradwire.autograd.graph.walk import node_of
from gradwire.current import spoken_line
from gradwire.ids import ContextId, WorkerId
from gradwire.optim.weight_versions import kept_in
from gradwire.rpc.graph_cut import Cut
from gradwire.seeing.graph_messages import (
    DescribeGraph,
    EdgeSeen,
    GraphParts,
    LocalPart,
    TensorShape,
)
from gradwire.seeing.graph_walk import Division, divide, walk
from gradwire.torch_private import AccumulateGrad, Node, saved_by

MOST_EDGES = 1024
"""of one worker in one picture, whatever a peer asks for"""
_MOST_TENSORS = 4
_MOST_NAMES = 6
_NAME_LETTERS = 60
_NOT_COUNTED = {AccumulateGrad, SEND, RECV}
_BACKWARD = re.compile(r"Backward\d*$")


def describe(
    engine: Engine,
    lineage: Lineage,
    question: DescribeGraph,
    cuts: list[Cut],
    roots: Sequence[torch.Tensor] = (),
) -> GraphParts:
    """The parts of a graph on this worker; `roots` if it is the one that draws it."""
    most = max(0, min(question.most, MOST_EDGES))
    asked = latest_numbers(of_worker(lineage, engine.edges.me), most)
    there = engine.edges.sent.copy()
    reached = [there[n] for n in asked if n in there]
    unused, unread = _unreached(engine, lineage, question.contexts)
    of_roots = {root: node for root in roots if (node := maybe_node_of(root)) is not None}
    first = walk([*of_roots.values(), *(sent.node for sent in reached)])
    black = divide(first, {})
    others = [*(sent.node for sent in unused[:most]), *unread[:most]]
    second = walk(others, first.inputs)
    grey = divide(second, black.part_of, len(black.parts))
    leaving = [*reached, *unused[:most]]
    sends = [sent.node for sent in leaving]
    shown, is_limited = _shown(black, grey, sends, of_roots.values(), 2 * most)
    look = _Look(engine, lineage, shown, measures=question.measures)
    parts = [look.at_part(nodes, is_reached=True) for nodes in shown.black]
    parts += [look.at_part(nodes, is_reached=False) for nodes in shown.grey]
    for root, node in of_roots.items():
        if node in shown.part_of:  # a leaf that parts use is in each of them
            parts[shown.part_of[node]].roots.append(shape_of(root))
    return GraphParts(
        parts,
        shown.inside,
        [look.at_sent(sent) for sent in leaving],
        [look.at_received(node) for node in shown.recvs],
        [n for n in asked if n not in there],
        is_limited
        or max(len(unused), len(unread)) > most
        or (first.is_cut_short or second.is_cut_short),
        cuts,
    )


class _Shown(NamedTuple):
    """The parts that are described, with new numbers."""

    black: list[list[Node]]
    grey: list[list[Node]]
    part_of: dict[Node, int]
    inside: list[tuple[int, int]]
    recvs: list[Node]


def _shown(
    black: Division, grey: Division, sends: list[Node], roots: Iterable[Node], most: int
) -> tuple[_Shown, bool]:
    """All; or the latest Recvs, and the parts of those, of Sends and of roots. And if not all."""
    part_of, inside = {**black.part_of, **grey.part_of}, [*black.inside, *grey.inside]
    count = len(black.parts)
    recvs = [node for node in part_of if type(node) is RECV]
    is_limited = max(len(recvs), count + len(grey.parts)) > most
    if is_limited:
        recvs.sort(key=lambda node: (part_of[node] < count, end_of(node).origin.depth))
        recvs = recvs[-most:]
        nodes = [*sends, *recvs, *(node for node in roots if node in part_of)]
        kept = sorted({part_of[node] for node in nodes})
    else:
        kept = list(range(count + len(grey.parts)))
    numbers = {part: n for n, part in enumerate(kept)}
    return _Shown(
        [black.parts[part] for part in kept if part < count],
        [grey.parts[part - count] for part in kept if part >= count],
        {node: numbers[part] for node, part in part_of.items() if part in numbers},
        [(numbers[s], numbers[t]) for s, t in inside if s in numbers and t in numbers],
        recvs,
    ), is_limited


def maybe_node_of(tensor: torch.Tensor) -> Node | None:
    """The node that a backward from this tensor begins with; None if it requires no gradient."""
    if not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return node_of(tensor)
    return torch.autograd.graph.get_gradient_edge(tensor).node


def shape_of(tensor: Any) -> TensorShape:  # noqa: ANN401  # or what torch keeps of an output
    """Its dtype and shape."""
    is_nested = getattr(tensor, "is_nested", False) or getattr(tensor, "is_nested_tensor", False)
    shape = [] if is_nested else [int(size) for size in tensor.shape]
    return TensorShape(str(tensor.dtype).removeprefix("torch."), shape)


def _unreached(
    engine: Engine, lineage: Lineage, contexts: Sequence[ContextId | None]
) -> tuple[list[Sent], list[Node]]:
    """What else was sent and received in these contexts; latest first."""

    shown = set(contexts)

    def is_other(node: Node) -> bool:
        end = end_of(node)
        return end.context in shown and not has(lineage, end.edge)

    sent = [each for each in engine.edges.sent.copy().values() if is_other(each.node)]
    received = [node for node in engine.edges.recvs() if is_other(node)]
    return sent[::-1], received[::-1]


def _bytes_of(output: Any) -> int:  # noqa: ANN401
    size: int = output.dtype.itemsize
    for each in shape_of(output).shape:
        size *= each
    return size


@final
class _Look:
    """Looks at parts and edges; a storage counts for the first part that has saved it."""

    def __init__(self, engine: Engine, lineage: Lineage, shown: _Shown, *, measures: bool) -> None:
        self._lineage, self._part_of = lineage, shown.part_of
        self._measures = measures and not len(engine.passes)
        self._counted: set[int] = set()

    def at_sent(self, sent: Sent) -> EdgeSeen:
        """The end of an edge that leaves."""
        behind = [(node, n) for node, n in sent.node.next_functions if node is not None]
        outputs = [node._input_metadata[n] for node, n in behind]
        line = spoken_line(sent.line)
        return self._at_end(sent.node, sent.peer, sent.depth, outputs, sent.bytes, line)

    def at_received(self, node: Node) -> EdgeSeen:
        """The end of an edge that arrives."""
        end, outputs = end_of(node), list(node._input_metadata)
        size = sum(map(_bytes_of, outputs))
        return self._at_end(node, end.peer, end.origin.depth, outputs, size, "")

    def _at_end(
        self, node: Node, peer: WorkerId, depth: int, outputs: list[Any], size: int, line: str
    ) -> EdgeSeen:
        edge, part = end_of(node).edge, self._part_of[node]
        shapes = [shape_of(output) for output in outputs[:_MOST_TENSORS]]
        is_reached = has(self._lineage, edge)
        return EdgeSeen(edge, peer, depth, part, shapes, len(outputs), size, line, is_reached)

    def at_part(self, nodes: list[Node], *, is_reached: bool) -> LocalPart:
        """What is said of a part."""
        leaves = [cast(Any, node).variable for node in nodes if type(node) is AccumulateGrad]
        inner = [node for node in nodes if type(node) not in _NOT_COUNTED]
        parameters = sum(isinstance(leaf, torch.nn.Parameter) for leaf in leaves)
        self._counted.update(_storage_of(leaf) for leaf in leaves if _has_storage(leaf))
        names = Counter(_BACKWARD.sub("", node.name())[:_NAME_LETTERS] for node in inner)
        saved, unknown = self._saved_by(inner) if is_reached else (0, 0)
        frequent = names.most_common(_MOST_NAMES)
        others = len(leaves) - parameters
        return LocalPart(len(inner), parameters, others, saved, unknown, frequent, is_reached, [])

    def _saved_by(self, nodes: Sequence[Node]) -> tuple[int, int]:
        if not self._measures:
            return 0, 1
        size, unknown = 0, 0
        for node in nodes:
            for kept, unpack in saved_by(node):
                tensor = kept_in(kept, unpack)
                if tensor is None:
                    continue
                if not isinstance(tensor, torch.Tensor) or not _has_storage(tensor):
                    unknown += 1
                elif _storage_of(tensor) not in self._counted:
                    self._counted.add(_storage_of(tensor))
                    size += tensor.untyped_storage().nbytes()
        return size, unknown


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _storage_of(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
