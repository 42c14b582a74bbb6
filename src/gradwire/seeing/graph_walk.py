"""Divides what lies on one worker of a graph into parts: the nodes between two crossings.

The walk reads and changes nothing: it sets no sequence number and unpacks no saved tensor.

Note [Which nodes are one part]: two nodes that are connected, and have the same *stage*. If only
connected nodes were asked for, a tensor that is used before a crossing and after it would make one
part of both sides, with an arrow from the part through another worker back to itself. The stage of
a node is a depth of edges (`Edges.next_depth`): at least that of each edge it depends on, and as
great as the stages of all that use it allow. So what is prepared early and used late, as the
transposed weight of a layer is, belongs to the part that uses it. The stage of a Send is the depth
of what it depends on, which is less than that of its edge. So stages never fall along an arrow
within a worker and grow along a crossing, and what parts are connected by has no cycle.

Leaves connect nothing: the micro-batches of a pipeline share their parameters, and are parts of
their own. Links and Joins are not drawn: they repeat, as an order, the way that leads through the
other workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple, final

from gradwire.autograd.graph.crossing import RECV, end_of
from gradwire.torch_private import AccumulateGrad, Node

MOST_NODES = 100_000
"""so many are looked at: a tenth of a second or two"""


class Walk(NamedTuple):
    """The nodes behind some others on this worker, those that use a node before the node."""

    inputs: dict[Node, list[Node]]
    is_cut_short: bool


def walk(roots: Iterable[Node], known: Collection[Node] = (), most: int = MOST_NODES) -> Walk:
    """What is behind these up to the Recvs; the nearest, if there are more than `most`.

    Nodes that are `known` belong to another walk.
    """
    found = {root: _inputs(root) for root in roots if root not in known}
    todo, is_cut_short = deque(found), False
    while todo:
        for behind in found[todo.popleft()]:
            if behind in found or behind in known:
                continue
            if len(found) >= most:
                is_cut_short = True
                break
            found[behind] = _inputs(behind)
            todo.append(behind)
    return Walk({node: found[node] for node in _users_first(found)}, is_cut_short)


def _inputs(node: Node) -> list[Node]:
    if type(node) is RECV:  # behind it are its anchor and links
        return []
    return [behind for behind, _ in node.next_functions if behind is not None]


def _users_first(inputs: dict[Node, list[Node]]) -> list[Node]:
    users = dict.fromkeys(inputs, 0)
    for behind in inputs.values():
        for node in behind:
            if node in users:
                users[node] += 1
    order = [node for node, count in users.items() if not count]
    for node in order:  # it grows meanwhile
        for each in inputs[node]:
            if each in users:
                users[each] -= 1
                if not users[each]:
                    order.append(each)
    return order


def stages_of(inputs: dict[Node, list[Node]]) -> dict[Node, int]:
    """The stage of each node but leaves. See Note [Which nodes are one part]."""
    depths: dict[Node, int] = {}
    for node in reversed(inputs):
        if type(node) is RECV:
            depths[node] = end_of(node).origin.depth
        else:
            depths[node] = max((depths.get(behind, 0) for behind in inputs[node]), default=0)
    stages: dict[Node, int] = {}
    for node, behind in inputs.items():
        stage = stages.setdefault(node, depths[node])
        for each in behind:
            if each in inputs:
                stages[each] = min(stage, stages.get(each, stage))
    return stages


@final
class _Sets:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parents: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        """The node that stands for the set of this one."""
        parents = self._parents
        top = node
        while (above := parents.get(top)) is not None:
            top = above
        while node is not top:
            parents[node], node = top, parents[node]
        return top

    def join(self, one: Node, other: Node) -> None:
        """They are in one set."""
        one, other = self.of(one), self.of(other)
        if one is not other:
            self._parents[one] = other


class Division(NamedTuple):
    """Nodes in parts, those that were made first before others."""

    parts: list[list[Node]]
    part_of: dict[Node, int]
    """of every node but leaves, which are in each part that uses them"""
    inside: list[tuple[int, int]]
    """from which part to which a tensor leads without a crossing"""


def divide(walked: Walk, known: dict[Node, int], first: int = 0) -> Division:
    """The parts of what was walked, numbered from `first`; `known` is the part of other nodes."""
    inputs = walked.inputs
    part_of = _numbered(inputs, first)
    parts: list[dict[Node, None]] = [{} for _ in set(part_of.values())]
    inside: dict[tuple[int, int], None] = {}
    unused = {node for node in inputs if type(node) is AccumulateGrad}  # but as a root
    for node, mine in part_of.items():
        parts[mine - first][node] = None
        for behind in inputs[node]:
            if type(behind) is AccumulateGrad:
                parts[mine - first][behind] = None
                unused.discard(behind)
            elif (other := part_of.get(behind, known.get(behind, mine))) != mine:
                inside[other, mine] = None
    for leaf in [node for node in inputs if node in unused]:
        part_of[leaf] = first + len(parts)
        parts.append({leaf: None})
    return Division([list(part) for part in parts], part_of, list(inside))


def _numbered(inputs: dict[Node, list[Node]], first: int) -> dict[Node, int]:
    """The part of every node but leaves."""
    stages, sets = stages_of(inputs), _Sets()
    inner = [node for node in inputs if type(node) is not AccumulateGrad]
    for node in inner:
        for behind in inputs[node]:
            if type(behind) is not AccumulateGrad and stages.get(behind) == stages[node]:
                sets.join(behind, node)
    inner.reverse()  # what was made first has the least number, of one stage
    numbers: dict[Node, int] = {}
    for node in sorted(inner, key=stages.__getitem__):
        numbers.setdefault(sets.of(node), first + len(numbers))
    return {node: numbers[sets.of(node)] for node in inner}
