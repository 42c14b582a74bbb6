"""The architecture, as a test: every import points down this list."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "gradwire"
LAYERS = [
    "errors",
    "ids",
    "places",
    "options",
    "events",
    "threads",
    "current",
    "torch_private",
    "wire",
    "transport",
    "agent",
    "autograd",
    "rpc",
    "optim",
    "nn",
    "seeing",
    "launch",
    "ray",
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
            is_pure = name.endswith(("_state", ".state")) or any(map(name.startswith, PURE_OF_OURS))
            assert is_pure, f"it knows {name}"
        else:
            assert name.split(".")[0] not in IMPURE, f"it must not know {name}"
            assert name.split(".")[0] in sys.stdlib_module_names, f"it must not know {name}"


def test_some_states_were_found():
    assert len([p for p in FILES if p.stem.endswith("state")]) >= 4


def test_only_options_reads_the_environment():
    readers = [spoken(path) for path in FILES if "os.environ" in path.read_text()]

    assert readers == ["options.py"]


UNPICKLERS = {"pickle", "_pickle", "pickletools", "copyreg", "cloudpickle", "dill", "joblib"} | {
    "marshal", "shelve", "xmlrpc", "_compat_pickle", "torch.serialization", "torch.multiprocessing"
}  # fmt: skip


def test_one_module_pickles():
    importers = {
        spoken(path)
        for path in FILES
        for name in imports(path)
        if name in UNPICKLERS or name.split(".")[0] in UNPICKLERS
    }

    assert importers == {"rpc/codec/pickle_codec.py"}


def test_nothing_else_loads_objects_by_another_name():
    ways = ("torch.load(", "np.load(", "numpy.load(", "allow_pickle", "torch.save(", "recv_obj")
    found = {(spoken(path), way) for path in FILES for way in ways if way in path.read_text()}

    assert not found
    receivers = [
        p for p in FILES if "multiprocessing" in p.read_text() and ".recv()" in p.read_text()
    ]
    assert not [spoken(path) for path in receivers], "Connection.recv() unpickles"


def test_what_is_between_a_process_and_its_children_is_for_the_launcher_only():
    calls = re.compile(r"\b(?:loads|dumps)\(")
    users = {spoken(path) for path in FILES if calls.search(path.read_text())}

    assert users == {"launch/child.py", "launch/fork_server.py", "rpc/codec/pickle_codec.py"}


def test_code_by_value_is_between_a_process_and_its_children():
    calls = re.compile(r"\b(?:loads|dumps)_with_code\(")
    users = {spoken(path) for path in FILES if calls.search(path.read_text())}

    assert users == {"launch/definitions.py", "launch/received.py", "rpc/codec/pickle_codec.py"}
    assert [spoken(p) for p in FILES if "gradwire.launch.received" in imports(p)] == [
        "launch/child.py", "launch/crew.py", "launch/definitions.py"
    ]  # fmt: skip


def test_what_unpickles_is_reached_by_the_launcher_only():
    users = [spoken(p) for p in FILES if "gradwire.launch.child" in imports(p)]

    assert users == [
        "launch/crew.py",
        "launch/run.py",
        "ray/run.py",
        "ray/seat.py",
        "ray/supervisor.py",
    ]


def test_no_file_is_a_drawer_for_everything():
    names = {path.stem for path in FILES}

    assert not names & {"utils", "common", "misc", "helpers", "manager"}
    assert [spoken(path) for path in FILES if path.stem == "base"] == ["transport/base.py"]
