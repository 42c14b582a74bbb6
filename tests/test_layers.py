"""The architecture, as a test: every import points down this list."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "gradwire"
LAYERS = [
    "errors",
    "ids",
    "options",
    "events",
    "door",
    "wire",
    "transport",
    "agent",
    "autograd",
    "rpc",
    "optim",
    "nn",
    "launch",
    "testing",
    "compat",
    "__main__",
]
FILES = sorted(ROOT.rglob("*.py"))
IMPURE = {"threading", "time", "socket", "logging", "random", "os", "queue", "torch", "asyncio"}
PURE_OF_OURS = {"gradwire.errors", "gradwire.ids"}


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def module_of(path: Path) -> str:
    return ".".join(["gradwire", *path.relative_to(ROOT).with_suffix("").parts])


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module]
            if node.module.count(".") < 2 and node.module.startswith("gradwire"):
                found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def spoken(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in FILES if p != ROOT / "__init__.py"], ids=spoken)
def test_imports_point_down(path):
    for name in imports(path):
        if name.startswith("gradwire."):
            assert layer(name) <= layer(module_of(path)), f"{spoken(path)} looks up to {name}"


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.endswith("state")], ids=spoken)
def test_states_are_pure(path):
    for name in imports(path):
        if name.startswith("gradwire"):
            is_pure = name.endswith("_state") or any(map(name.startswith, PURE_OF_OURS))
            assert is_pure, f"it knows {name}"
        else:
            assert name.split(".")[0] not in IMPURE, f"it must not know {name}"
            assert name.split(".")[0] in sys.stdlib_module_names, f"it must not know {name}"


def test_some_states_were_found():
    assert len([p for p in FILES if p.stem.endswith("state")]) >= 4


def test_only_options_reads_the_environment():
    readers = [spoken(path) for path in FILES if "os.environ" in path.read_text()]

    assert readers == ["options.py"]


def test_nothing_that_a_peer_sent_is_unpickled():
    importers = [spoken(p) for p in FILES if any(n.split(".")[0] == "pickle" for n in imports(p))]

    assert importers == [
        "launch/luggage.py",  # between run() and its own children
        "rpc/pickled.py",  # where the manner of compat asks for it
    ]


def test_what_unpickles_is_reached_by_the_launcher_only():
    users = [spoken(p) for p in FILES if "gradwire.launch.luggage" in imports(p)]

    assert all(user.startswith("launch/") for user in users)


def test_no_file_is_a_drawer_for_everything():
    names = {path.stem for path in FILES}

    assert not names & {"utils", "common", "misc", "helpers", "manager"}
    assert [spoken(path) for path in FILES if path.stem == "base"] == ["transport/base.py"]
