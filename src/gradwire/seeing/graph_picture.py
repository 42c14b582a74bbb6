"""Graph: a picture of the graph of crossings, as text, SVG and DOT.

Pure data, with no tensors: it may be kept, printed and drawn when the graph is gone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gradwire.errors import UsageError
from gradwire.seeing.graph_model import EdgeKind, GraphEdge, GraphPart
from gradwire.seeing.graph_svg import svg_of
from gradwire.seeing.graph_text import dot_of, text_of


@final
@dataclass(frozen=True, slots=True)
class Graph:
    """A picture of the graph that some tensors depend on, over all workers. See `graph`.

    It shows itself in a notebook; `print` shows it as text.
    """

    drawn_by: str
    """the worker that has asked the others"""
    workers: tuple[str, ...]
    """one lane each"""
    parts: tuple[GraphPart, ...]
    edges: tuple[GraphEdge, ...]
    silent: tuple[tuple[str, str], ...] = ()
    """the workers that have not described their parts, and why"""
    left_out: tuple[str, ...] = ()
    """what is not shown, in words"""

    @property
    def crossings(self) -> list[GraphEdge]:
        """The edges between workers, and from a worker to itself by a call."""
        return [edge for edge in self.edges if edge.kind is EdgeKind.CROSSING]

    @property
    def cuts(self) -> list[GraphEdge]:
        """The places where tensors have crossed without their graph."""
        return [edge for edge in self.edges if edge.kind is EdgeKind.CUT]

    def __str__(self) -> str:
        return text_of(self)

    def dot(self) -> str:
        """The picture in the language of graphviz."""
        return dot_of(self)

    def svg(self) -> str:
        """The picture, readable on light and dark ground."""
        return svg_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file: as `.svg`, `.dot` or `.txt`."""
        target = Path(path)
        forms = {".svg": self.svg, ".dot": self.dot, ".txt": self.__str__}
        form = forms.get(target.suffix)
        if form is None:
            raise UsageError(
                f"a graph is not saved as {target.name}",
                hint=f"end the name in {', '.join(forms)}",
            )
        target.write_text(form(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg()}</div>'
