"""Joins what the workers say of their parts into one Graph. Pure, and trusts no worker.

Both ends of an edge describe it. Where only one does, something stands at the other end: a worker
that has not answered, an edge that was released, or parts over the limit of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

from gradwire.errors import BadMessage
from gradwire.ids import EdgeId, WorkerId
from gradwire.rpc.graph_cut import Cut
from gradwire.seeing.graph_messages import EdgeSeen, GraphParts, LocalPart
from gradwire.seeing.graph_model import EdgeKind, GraphEdge, GraphPart, PartKind, counted
from gradwire.seeing.graph_picture import Graph

_MOST_LETTERS = 200


class Answers(NamedTuple):
    """What was heard of each worker: its parts, or why there are none."""

    described: dict[WorkerId, GraphParts]
    silent: dict[WorkerId, str]


def check_parts(parts: GraphParts, worker: WorkerId) -> None:
    """BadMessage if it names parts that it does not describe, or edges of others as its own."""
    count = len(parts.parts)
    ends = [*parts.sent, *parts.received]
    numbers = [number for pair in parts.inside for number in pair] + [end.part for end in ends]
    if any(not 0 <= number < count for number in numbers):
        raise BadMessage(f"w{worker} says what is connected to a part that it does not describe")
    if any(end.edge.worker != worker for end in parts.sent):
        raise BadMessage(f"w{worker} describes an edge of another worker as one that it has sent")
    if any(end.edge.worker != end.peer for end in parts.received):
        raise BadMessage(f"w{worker} describes an edge from a worker that has not sent it")


def other_workers(answers: Answers, asked: Sequence[WorkerId]) -> list[WorkerId]:
    """Those at the other ends of what was described, besides those that were asked."""
    found: dict[WorkerId, None] = {}
    for parts in answers.described.values():
        found.update((end.peer, None) for end in (*parts.sent, *parts.received))
        for cut in parts.cuts:
            found.update((each, None) for each in (cut.source, cut.to) if each is not None)
    return [worker for worker in sorted(found) if worker not in asked]


def joined(
    answers: Answers, names: Mapping[WorkerId, str], me: WorkerId, left_out: Mapping[WorkerId, int]
) -> Graph:
    """The picture as `me` draws it; `left_out` counts the edges of each worker not asked for."""
    joining = _Joining(answers, names, left_out)
    joining.add_parts()
    joining.add_crossings()
    for worker, parts in sorted(answers.described.items()):
        for cut in parts.cuts:
            joining.add_cut(worker, cut)
    lanes = sorted({*joining.lanes(), me, *answers.silent})
    further = sum(left_out.values())
    said = [f"{counted(further, 'edge')} further from the roots: not drawn"] if further else []
    said += [
        f"{names[worker]}: more than is drawn"
        for worker, parts in sorted(answers.described.items())
        if parts.is_cut_short
    ]
    return Graph(
        names[me],
        tuple(names[lane] for lane in lanes),
        tuple(joining.parts),
        tuple(joining.edges),
        tuple((names[worker], cleaned(why)) for worker, why in sorted(answers.silent.items())),
        tuple(said),
    )


@final
class _Joining:
    """The parts and edges so far."""

    def __init__(
        self, answers: Answers, names: Mapping[WorkerId, str], left_out: Mapping[WorkerId, int]
    ) -> None:
        self._answers, self._names, self._left_out = answers, names, left_out
        self.parts: list[GraphPart] = []
        self.edges: list[GraphEdge] = []
        self._lanes: list[WorkerId] = []
        """of each part"""
        self._first: dict[WorkerId, int] = {}
        self._stand_ins: dict[tuple[WorkerId, PartKind, int], int] = {}
        """by the part at the other end"""

    def lanes(self) -> set[WorkerId]:
        """The workers with a part."""
        return set(self._lanes)

    def _add(self, worker: WorkerId, part: GraphPart) -> int:
        self.parts.append(part)
        self._lanes.append(worker)
        return len(self.parts) - 1

    def add_parts(self) -> None:
        """What each worker has described, and its edges inside."""
        for worker, parts in sorted(self._answers.described.items()):
            first = self._first[worker] = len(self.parts)
            for part in parts.parts:
                self._add(worker, _part(self._names[worker], part))
            for source, target in dict.fromkeys(parts.inside):
                if source != target:
                    is_reached = self.parts[first + target].is_reached
                    ends = first + source, first + target
                    self.edges.append(GraphEdge(*ends, EdgeKind.INSIDE, is_reached=is_reached))

    def add_crossings(self) -> None:
        """Each edge that at least one end describes, by depth."""
        described = sorted(self._answers.described.items())
        sent = {end.edge: end for _, parts in described for end in parts.sent}
        received: dict[EdgeId, tuple[WorkerId, EdgeSeen]] = {}
        for worker, parts in described:
            for end in parts.received:
                known = sent.get(end.edge)
                if known is None or known.peer == worker:
                    received[end.edge] = worker, end
        edges = {**{edge: to.depth for edge, (_, to) in received.items()}}
        edges |= {edge: end.depth for edge, end in sent.items()}
        arrivals = self._stand_ins_of_silent(edges, sent, received)
        for edge in sorted(edges, key=lambda edge: (edges[edge], edge)):
            self._add_crossing(edge, sent.get(edge), received.get(edge), arrivals)

    def _stand_ins_of_silent(
        self,
        depths: Mapping[EdgeId, int],
        sent: Mapping[EdgeId, EdgeSeen],
        received: Mapping[EdgeId, tuple[WorkerId, EdgeSeen]],
    ) -> dict[tuple[EdgeId, bool], int]:
        """What stands for the parts of workers that have not answered: by edge, and its end.

        In the order of depths, a worker that receives after it has sent begins another part. So
        what stands there has no arrow back to itself: an edge is deeper than all it depends on.
        """
        found: dict[tuple[EdgeId, bool], int] = {}
        for worker in sorted(self._answers.silent):
            part, has_sent = -1, False
            arriving = [e for e, end in sent.items() if end.peer == worker and e not in received]
            leaving = [e for e in received if e.worker == worker]
            ends = [(depths[e], False, e) for e in arriving]
            ends += [(depths[e], True, e) for e in leaving]
            for _, leaves, edge in sorted(ends):
                if part < 0 or (has_sent and not leaves):
                    part = self._add(worker, GraphPart(self._names[worker], PartKind.SILENT))
                has_sent = leaves
                found[edge, leaves] = part
        return found

    def _add_crossing(
        self,
        edge: EdgeId,
        sent: EdgeSeen | None,
        received: tuple[WorkerId, EdgeSeen] | None,
        silent: Mapping[tuple[EdgeId, bool], int],
    ) -> None:
        seen = sent or (received and received[1])
        assert seen is not None, "neither end has described it"
        source = -1 if sent is None else self._first[edge.worker] + sent.part
        target = -1 if received is None else self._first[received[0]] + received[1].part
        if source < 0:
            known = silent.get((edge, True))
            source = self._stand_in(edge.worker, target, edge, seen) if known is None else known
        if target < 0:
            known = silent.get((edge, False))
            target = self._stand_in(seen.peer, source, edge, seen) if known is None else known
        tensors = tuple(cleaned(str(tensor)) for tensor in seen.tensors)
        size, line = max(0, seen.bytes), cleaned(seen.line)
        self.edges.append(
            GraphEdge(
                *(source, target, EdgeKind.CROSSING, str(edge)),
                *(tensors, seen.count, size, line),
                is_reached=seen.is_reached,
            )
        )

    def _stand_in(self, worker: WorkerId, other: int, edge: EdgeId, seen: EdgeSeen) -> int:
        """What stands at the end that nobody has described; `other` is the part at the other."""
        parts = self._answers.described.get(worker)
        is_limited = parts is None or parts.is_cut_short or bool(self._left_out.get(worker))
        is_gone = parts is not None and edge.worker == worker and edge.n in parts.gone
        kind = PartKind.LEFT_OUT if is_limited and not is_gone else PartKind.GONE
        key = (worker, kind, other)
        if key not in self._stand_ins:
            part = GraphPart(self._names[worker], kind, is_reached=seen.is_reached)
            self._stand_ins[key] = self._add(worker, part)
        elif seen.is_reached:
            known = self._stand_ins[key]
            self.parts[known] = replace(self.parts[known], is_reached=True)
        return self._stand_ins[key]

    def add_cut(self, seen_by: WorkerId, cut: Cut) -> None:
        """What a worker has warned of."""
        left = seen_by if cut.source is None else cut.source
        to = seen_by if cut.to is None else cut.to
        if left not in self._names or to not in self._names:
            return
        ends = [self._add(w, GraphPart(self._names[w], PartKind.CUT)) for w in (left, to)]
        line, what = cleaned(cut.line), cleaned(cut.what)
        self.edges.append(
            GraphEdge(
                *(ends[0], ends[1], EdgeKind.CUT),
                count=cut.tensors,
                line=line,
                what=what,
                times=cut.times,
            )
        )


def _part(worker: str, part: LocalPart) -> GraphPart:
    counts = part.nodes, part.parameters, part.leaves, part.saved, part.unknown
    operators = tuple((cleaned(name), count) for name, count in part.operators)
    roots = tuple(cleaned(str(root)) for root in part.roots)
    return GraphPart(worker, PartKind.LOCAL, *counts, operators, part.is_reached, roots)


def cleaned(text: str) -> str:
    """A text of a peer, short and without what a terminal or XML would stumble over."""
    clipped = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
    return "".join(letter if letter.isprintable() else "?" for letter in clipped)
