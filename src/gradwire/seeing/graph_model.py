"""The parts of a graph on its workers, the edges between them, and how both are put in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import final


class PartKind(Enum):
    """What stands for a part."""

    LOCAL = "local"
    """nodes on a worker that has described them"""
    SILENT = "silent"
    """what lies on a worker that has not answered"""
    GONE = "gone"
    """was released, by the end of a context or the loss of a worker, or has not arrived yet"""
    LEFT_OUT = "left out"
    """is over the limit of what is drawn"""
    CUT = "cut"
    """tensors that crossed without their graph"""


class EdgeKind(Enum):
    """How one part uses another."""

    CROSSING = "crossing"
    INSIDE = "inside"
    """on one worker"""
    CUT = "cut"
    """no gradient comes back"""


@final
@dataclass(frozen=True, slots=True)
class GraphPart:
    """A part of the graph on one worker, between its crossings."""

    worker: str
    kind: PartKind = PartKind.LOCAL
    nodes: int = 0
    parameters: int = 0
    leaves: int = 0
    """other tensors that gradients are added to"""
    saved: int = 0
    """bytes that its nodes have saved for the backward, besides parameters; 0 if not reached"""
    unknown: int = 0
    """saved tensors whose size is not known"""
    operators: tuple[tuple[str, int], ...] = ()
    """the most frequent ones"""
    is_reached: bool = True
    """whether the roots depend on it"""
    roots: tuple[str, ...] = ()
    """dtypes and shapes of the roots in it"""


@final
@dataclass(frozen=True, slots=True)
class GraphEdge:
    """One part uses what another has made."""

    source: int
    """the number of a part"""
    target: int
    kind: EdgeKind = EdgeKind.CROSSING
    name: str = ""
    """e0.1, as in errors and `live_edges`"""
    tensors: tuple[str, ...] = ()
    """their dtypes and shapes; the first few"""
    count: int = 0
    """how many tensors there are"""
    bytes: int = 0
    line: str = ""
    """of the program that sent them; "" for the result of a call"""
    what: str = ""
    """of a cut: what they crossed in"""
    times: int = 1
    """of a cut: how often this line has done so"""
    is_reached: bool = True


# -- the same words in all forms


def sized(count: int) -> str:
    """A number of bytes, in three digits."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


def counted(count: int, what: str, many: str = "") -> str:
    """A number of things."""
    return f"{count} {what if count == 1 else many or what + 's'}"


def said_of_part(part: GraphPart) -> list[str]:
    """What stands in its box, line by line."""
    match part.kind:
        case PartKind.SILENT:
            return ["unknown"]
        case PartKind.GONE:
            return ["not there"]
        case PartKind.LEFT_OUT:
            return ["not drawn"]
        case PartKind.CUT:
            return ["cut"]
        case PartKind.LOCAL:
            pass
    said = [counted(part.nodes, "node")] if part.nodes else []
    if part.parameters:
        said.append(counted(part.parameters, "parameter"))
    if part.leaves:
        said.append(counted(part.leaves, "leaf", "leaves"))
    if part.saved or part.unknown:
        said.append(_said_of_saved(part))
    said += [f"root {root}" for root in part.roots]
    return said or (["passed on"] if part.is_reached else ["no nodes"])


def _said_of_saved(part: GraphPart) -> str:
    if not part.unknown:
        return f"{sized(part.saved)} saved"
    return f"over {sized(part.saved)} saved" if part.saved else "saved: unknown"


def said_of_tensors(edge: GraphEdge) -> str:
    """The dtypes and shapes of what crosses."""
    if not edge.tensors:
        return counted(edge.count, "tensor") if edge.count else ""
    if edge.count == 1:
        return edge.tensors[0]
    return f"{edge.tensors[0]} and {edge.count - 1} more"


def said_of_line(line: str, folders: int = 0) -> str:
    """A line of the program, with the last folders of its path only."""
    path, colon, number = line.rpartition(":")
    return colon and f"{'/'.join(Path(path).parts[-1 - folders :])}:{number}"
