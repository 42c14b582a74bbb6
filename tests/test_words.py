"""One word for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "gradwire"

STAND_INS = {"Event", "RemoteModule", "Stream"}
"""These stand for a class of Python's or torch's that has the same name."""


def test_no_class_name_is_used_twice():
    modules = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(path.relative_to(ROOT).as_posix())

    twice = {name: paths for name, paths in modules.items() if len(paths) > 1}

    assert {name: twice[name] for name in twice.keys() - STAND_INS} == {}
    assert twice.keys() >= STAND_INS
