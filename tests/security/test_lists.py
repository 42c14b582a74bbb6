"""The two lists of torch's, gone over: nothing on them reads or writes files, or runs text.

By name, by the schemas of the operators, by the source of what is Python, and by calling each with
the name of a file wherever it takes anything.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from gradwire.rpc.expose import torch_allowlist
from gradwire.rpc.expose.registry import DUNDERS

LINES = sorted(torch_allowlist.operators() | torch_allowlist.classes())
NEVER = """
    apply_ as_strided_ asarray classes compile data data_ptr empty empty_like empty_permuted
    empty_strided exec fork from_dlpack from_file from_numpy frombuffer get_submodule hub
    import_ir_module jit load load_library load_url map2_ map_ module_load new_empty
    new_empty_strided numpy open ops parse_ir pickle record_stream register_buffer
    register_module register_parameter resize_ resize_as_ save script serialization set_ set_data
    share_memory share_memory_ skip_init storage system to_dlpack to_empty trace_module
    untyped_storage
"""
WORDS = """
    approximate equation indexing interpolation mode pad_mode padding reduce rounding_mode side
"""
CALLED = {"open", "exec", "eval", "compile", "__import__", "globals", "locals", "breakpoint"}
MODULES = {"os", "subprocess", "importlib", "pickle", "shutil", "tempfile", "socket", "ctypes"}


def last(line: str) -> str:
    return line.replace(":", ".").rpartition(".")[2]


def test_no_line_has_a_forbidden_name():
    names = {last(line) for line in LINES}
    assert not names & set(NEVER.split())
    assert {name for name in names if name.startswith("_")} <= DUNDERS
    assert all(line.startswith("torch") for line in LINES)


def schemas():
    for line in LINES:
        name = last(line)
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or name in DUNDERS or line.startswith(("torch.nn:", "torch.optim")):
            continue
        for overload in packet.overloads():
            yield line, getattr(packet, overload)._schema


def test_no_operator_takes_a_path_a_pointer_or_a_function():
    words = set(WORDS.split())
    operands = {"a", "b", "el", "self", "separator", "substr"}  # of strings in TorchScript
    seen = 0
    for line, schema in schemas():
        seen += 1
        for argument in schema.arguments:
            kind = str(argument.type)
            if "str" in kind and "stride" not in kind:
                assert argument.name in words | operands, (line, str(schema))
            for forbidden in ("Storage", "Stream", "Callable", "__torch__", "Future", "PyObject"):
                assert forbidden not in kind, (line, str(schema))
            assert "file" not in argument.name, (line, str(schema))
    assert seen > 1000


def functions_of(line: str):
    found = torch_allowlist._maybe_fetch(line)
    if isinstance(found, type):
        return [vars(found)["__init__"]] if "__init__" in vars(found) else []
    return [inspect.unwrap(found)] if callable(found) else []


def names_used(function) -> set[str]:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # compiled
        return set()
    targets = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    direct = {target.id for target in targets if isinstance(target, ast.Name)}
    owners = {getattr(getattr(target, "value", None), "id", "") for target in targets}
    return direct & CALLED | owners & MODULES


def test_the_source_of_what_is_python_calls_nothing_of_the_kind():
    assert names_used(torch.save)  # it does find such calls
    assert names_used(torch.hub.download_url_to_file)
    found = {line: names for line in LINES for f in functions_of(line) if (names := names_used(f))}
    # They import a part of torch, whose name is written there.
    decomposed = {"interpolate", "max_pool3d_with_indices", "pad"}
    assert found.keys() <= {f"torch.nn.functional:{name}" for name in decomposed}
    assert all(names == {"importlib"} for names in found.values())


WATCHED = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from gradwire.rpc.expose import torch_allowlist

directory = sys.argv[1]
path, code = directory + "/file", f"open({directory + '/evaluated'!r}, 'w')"
events = []
WATCH = ("exec", "compile", "os.", "subprocess.", "socket.", "pickle.", "marshal.", "open")

def hook(event, args):
    if event.startswith(WATCH) and any(directory in str(arg) for arg in args):
        events.append((event, args))

def ways(text):
    x = torch.ones(2)
    yield (text,), {}
    yield (x, text), {}
    yield (x, x, text), {}
    yield (text, x), {}
    yield ([text],), {}
    yield ({text: text},), {}
    yield (x,), {"filename": text}
    yield (), {"filename": text, "size": 4, "shared": True}
    yield (x,), {"out": text}
    yield (1, 1), {"device": text}

def call_all(functions):
    for name, function in functions:
        for text in (path, code, "file://" + path):
            for args, kwargs in ways(text):
                before = len(events)
                try:
                    function(*args, **kwargs)
                except Exception:
                    pass
                if len(events) > before or os.listdir(directory):
                    yield name

sys.addaudithook(hook)
controls = [("save", lambda *a, **k: torch.save(a, path)), ("eval", lambda *a, **k: eval(code)),
            ("from_file", lambda *a, **k: torch.from_file(**k))]
for control in controls:
    assert set(call_all([control])) == {control[0]}, control[0]
    for file in os.listdir(directory):
        os.unlink(directory + "/" + file)
    events.clear()
lines = sorted(torch_allowlist.operators() | torch_allowlist.classes())
listed = [(line, torch_allowlist.maybe_find(line)) for line in lines]
listed = [(line, found) for line, found in listed if found is not None]
for name in call_all(listed):
    print("FOUND", name, events[-1:])
print("called", len(listed))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_none_of_them_touches_a_file_or_runs_a_text_whatever_it_is_given(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FOUND" not in done.stdout
    assert int(done.stdout.split()[-1]) > 1500
