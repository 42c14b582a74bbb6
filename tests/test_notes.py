"""Facts that span files are named notes: each cited one is defined, exactly once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "gradwire"
_NOTE = re.compile(r"(?P<before>\S*)[\s#]*\bNote \[(?P<name>[^\]]+)\]")


def notes(text: str) -> tuple[list[str], list[str]]:
    """The notes that a text defines, and those it cites: 'see' stands before a citation."""
    defined, cited = [], []
    for found in _NOTE.finditer(text):
        name = " ".join(found["name"].replace("#", " ").split())
        (cited if found["before"].lower().endswith("see") else defined).append(name)
    return defined, cited


def all_notes() -> tuple[Counter[str], set[str]]:
    defined: Counter[str] = Counter()
    cited: set[str] = set()
    for path in ROOT.rglob("*.py"):
        here, there = notes(path.read_text(encoding="utf-8"))
        defined.update(here)
        cited.update(there)
    return defined, cited


def test_a_citation_is_told_from_a_definition():
    text = (
        '"""Note [One]\nSee Note [Two], and (see Note [Three\n# lines]).\n# see\n# Note [Four]"""'
    )

    assert notes(text) == (["One"], ["Two", "Three lines", "Four"])


def test_every_note_that_is_cited_is_defined():
    defined, cited = all_notes()

    assert cited - defined.keys() == set()


def test_no_note_is_defined_twice():
    defined, _ = all_notes()

    assert [name for name, times in defined.items() if times > 1] == []
