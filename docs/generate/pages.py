"""Which pages are generated, and whether what is there is still true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docs.generate import architecture, graph, reference, size, wire

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "gradwire"


@dataclass(frozen=True, slots=True)
class Page:
    """A file, and how its text follows from the code; a part of it may be written by hand."""

    path: Path
    text_from: Callable[[str], str]

    def text(self) -> str:
        """What the page should say."""
        return self.text_from(self.current())

    def current(self) -> str:
        """What it says."""
        return self.path.read_text(encoding="utf-8") if self.path.exists() else ""

    def is_stale(self) -> bool:
        """Whether the two differ."""
        return self.text() != self.current()

    def write(self) -> None:
        """Make it say what it should."""
        self.path.write_text(self.text(), encoding="utf-8")


PAGES = [
    Page(ROOT / "docs" / "wire.md", lambda _: wire.page()),
    Page(ROOT / "docs" / "reference.md", lambda _: reference.page()),
    Page(ROOT / "README.md", lambda text: size.in_text(text, PACKAGE)),
    Page(ROOT / "docs" / "architecture.svg", lambda _: architecture.page(PACKAGE)),
    Page(ROOT / "docs" / "graph.svg", lambda _: graph.page()),
]
